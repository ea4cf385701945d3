"""The encoder of InternVL: a vision transformer whose branches are scaled, and whose patches are joined in squares."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import ACTIVATIONS, LayerNorm, Linear, RMSNorm, attend, patches
from quire.multimodal.families.base import Config
from quire.multimodal.families.internvl import first
from quire.multimodal.spec import MediaSpec

DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}


class Layer:
    def __init__(self, builder: Builder, name: str, config: Config) -> None:
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        eps = config["layer_norm_eps"]
        self.heads = config["num_attention_heads"]
        self.activation = ACTIVATIONS[config["hidden_act"]]
        norm: Callable[..., Callable[[Tensor], Tensor]]
        norm = RMSNorm if config.get("norm_type") == "rms_norm" else LayerNorm
        self.norm1, self.norm2 = (norm(builder, f"{name}.layernorm_{at}", hidden, eps) for at in ("before", "after"))
        self.scale1, self.scale2 = (builder.whole(f"{name}.lambda_{i}", hidden) for i in (1, 2))
        bias = bool(config.get("attention_bias", False))
        self.qkv = None
        if config.get("fused_qkv"):
            self.qkv = Linear(builder, f"{name}.attention.qkv", hidden, 3 * hidden, bias)
        else:
            self.q, self.k, self.v = (
                Linear(builder, f"{name}.attention.{part}_proj", hidden, hidden, bias) for part in "qkv"
            )
        self.q_norm = self.k_norm = None
        if config.get("use_qk_norm"):
            self.q_norm, self.k_norm = (RMSNorm(builder, f"{name}.attention.{p}_norm", hidden, 1e-6) for p in "qk")
        self.out = Linear(builder, f"{name}.attention.projection_layer", hidden, hidden)
        self.fc1 = Linear(builder, f"{name}.mlp.fc1", hidden, inner)
        self.fc2 = Linear(builder, f"{name}.mlp.fc2", inner, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            self.qkv(normed).chunk(3, -1) if self.qkv is not None else (self.q(normed), self.k(normed), self.v(normed))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        x = x + self.scale1 * self.out(attend(q, k, v, self.heads))
        return x + self.scale2 * self.fc2(self.activation(self.fc1(self.norm2(x))))


class Tower:
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        config = spec.config
        name = "vision_tower"
        vision = {**DEFAULTS, **config["vision_config"]}
        width = vision["hidden_size"]
        self.patch = first(vision.get("patch_size", 14))
        side = first(vision.get("image_size", 448)) // self.patch
        self.factor = round(1 / config.get("downsample_ratio", 0.5))
        self.class_token = builder.whole(f"{name}.embeddings.cls_token", 1, 1, width)
        self.positions = builder.whole(f"{name}.embeddings.position_embeddings", 1, side**2 + 1, width)
        kernel = (self.patch, self.patch)
        projection = f"{name}.embeddings.patch_embeddings.projection"
        self.embedding = Linear(builder, projection, 3 * self.patch**2, width, True, kernel)
        count = vision["num_hidden_layers"]
        read = config.get("vision_feature_layer", -1) % (count + 1)
        self.layers = [Layer(builder, f"{name}.encoder.layer.{i}", vision) for i in range(read)]
        self.norm = None
        if read == count and not vision.get("use_mean_pooling", True):
            self.norm = LayerNorm(builder, f"{name}.layernorm", width, vision["layer_norm_eps"])
        joined = width * self.factor**2
        hidden = config["text_config"]["hidden_size"]
        self.joined_norm = LayerNorm(builder, "multi_modal_projector.layer_norm", joined, 1e-5)
        inner = config.get("projector_hidden_size", hidden)
        bias = config.get("projector_bias", True)
        self.linear_1 = Linear(builder, "multi_modal_projector.linear_1", joined, inner, bias)
        self.linear_2 = Linear(builder, "multi_modal_projector.linear_2", inner, hidden, bias)
        self.activation = ACTIVATIONS[config.get("projector_hidden_act", "gelu")]

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        cut = patches(tensors["pixel_values"].to(self.positions.dtype), self.patch)
        count, side, _, _ = cut.shape
        x = self.embedding(cut).flatten(1, 2)
        x = torch.cat([self.class_token.expand(count, 1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None:
            x = self.norm(x)
        x = x[:, 1:]
        factor = self.factor
        squares = x.reshape(count, side // factor, factor, side // factor, factor, -1).transpose(2, 3)
        joined = self.joined_norm(squares.reshape(-1, factor**2 * x.shape[-1]))
        return self.linear_2(self.activation(self.linear_1(joined)))


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
