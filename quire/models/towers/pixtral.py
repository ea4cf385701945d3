"""The encoder of Pixtral and Mistral Small 3.1: a transformer with rotary positions in two dimensions. In the latter,
squares of patches are joined before they are projected."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import ACTIVATIONS, Linear, RMSNorm, attend, patches, rotate
from quire.multimodal.families.base import Config
from quire.multimodal.spec import MediaSpec

EPS = 1e-5


class Layer:
    def __init__(self, builder: Builder, name: str, config: Config) -> None:
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        self.heads, self.activation = config["num_attention_heads"], ACTIVATIONS[config.get("hidden_act", "gelu")]
        self.norm1 = RMSNorm(builder, f"{name}.attention_norm", hidden, EPS)
        self.q, self.k, self.v, self.out = (
            Linear(builder, f"{name}.attention.{part}_proj", hidden, hidden, bias=False) for part in "qkvo"
        )
        self.norm2 = RMSNorm(builder, f"{name}.ffn_norm", hidden, EPS)
        self.gate, self.up = (
            Linear(builder, f"{name}.feed_forward.{part}_proj", hidden, inner, bias=False) for part in ("gate", "up")
        )
        self.down = Linear(builder, f"{name}.feed_forward.down_proj", inner, hidden, bias=False)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [1, patches, hidden]; cos, sin: [patches, 1, dim]"""
        normed = self.norm1(x)
        q, k = (
            rotate(part.view(x.shape[1], self.heads, -1), cos, sin).flatten(1)[None]
            for part in (self.q(normed), self.k(normed))
        )
        x = x + self.out(attend(q, k, self.v(normed), self.heads))
        normed = self.norm2(x)
        return x + self.down(self.activation(self.gate(normed)) * self.up(normed))


class Tower:
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        config = spec.config
        vision = {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "patch_size": 16,
            **config["vision_config"],
        }
        width, self.patch, self.merge = vision["hidden_size"], vision["patch_size"], config.get("spatial_merge_size", 1)
        self.dim = width // vision["num_attention_heads"]
        self.theta = (vision.get("rope_parameters") or {}).get("rope_theta") or vision.get("rope_theta", 10_000.0)
        kernel = (self.patch, self.patch)
        self.embedding = Linear(builder, "vision_tower.patch_conv", 3 * self.patch**2, width, False, kernel)
        self.norm = RMSNorm(builder, "vision_tower.ln_pre", width, EPS)
        count = vision["num_hidden_layers"]
        read = config.get("vision_feature_layer", -1) % (count + 1)
        layers = [Layer(builder, f"vision_tower.transformer.layers.{i}", vision) for i in range(read)]
        self.layers = layers
        text = config["text_config"]
        name = "multi_modal_projector"
        bias = config.get("multimodal_projector_bias", self.merge == 1)
        self.merged_norm = self.merger = None
        if self.merge > 1:
            self.merged_norm = RMSNorm(builder, f"{name}.norm", width, text.get("rms_norm_eps", 1e-6))
            merger = f"{name}.patch_merger.merging_layer"
            self.merger = Linear(builder, merger, width * self.merge**2, width, bias=False)
        self.linear_1 = Linear(builder, f"{name}.linear_1", width, text["hidden_size"], bias)
        self.linear_2 = Linear(builder, f"{name}.linear_2", text["hidden_size"], text["hidden_size"], bias)
        self.activation = ACTIVATIONS[config.get("projector_hidden_act", "gelu")]

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        cut = patches(tensors["pixel_values"][None].to(self.embedding.weight.dtype), self.patch)
        _, rows, columns, _ = cut.shape
        x = self.norm(self.embedding(cut).flatten(1, 2))
        cos, sin = self._rotation(rows, columns, x.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = x[0]
        if self.merged_norm is not None and self.merger is not None:
            grid = self.merged_norm(x).T.reshape(1, -1, rows, columns)
            x = self.merger(F.unfold(grid, self.merge, stride=self.merge)[0].T)
        return self.linear_2(self.activation(self.linear_1(x)))

    def _rotation(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The pairs rotate alternately with the row and the column. cos, sin: [patches, 1, dim], float32"""
        frequencies = 1.0 / self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim)
        index = torch.arange(rows * columns, device=device)[:, None]
        angles = torch.cat((index // columns * frequencies[0::2], index % columns * frequencies[1::2]), 1)
        angles = torch.cat((angles, angles), 1)[:, None]
        return angles.cos(), angles.sin()


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
