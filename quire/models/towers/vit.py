"""The vision transformers of CLIP (arXiv:2103.00020) and SigLIP (arXiv:2303.15343)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import ACTIVATIONS, LayerNorm, Linear, attend, patches
from quire.multimodal.families.base import Config


class Layer:
    def __init__(self, builder: Builder, name: str, config: Config, eps: float, activation: str) -> None:
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        self.heads = config["num_attention_heads"]
        self.activation = ACTIVATIONS[activation]
        self.norm1 = LayerNorm(builder, f"{name}.layer_norm1", hidden, eps)
        self.q, self.k, self.v, self.out = (
            Linear(builder, f"{name}.self_attn.{part}", hidden, hidden)
            for part in ("q_proj", "k_proj", "v_proj", "out_proj")
        )
        self.norm2 = LayerNorm(builder, f"{name}.layer_norm2", hidden, eps)
        self.fc1 = Linear(builder, f"{name}.mlp.fc1", hidden, inner)
        self.fc2 = Linear(builder, f"{name}.mlp.fc2", inner, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.out(attend(self.q(normed), self.k(normed), self.v(normed), self.heads))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))


class VisionTransformer:
    """A tower for images of a fixed size. It computes only the layers that are read."""

    def __init__(self, builder: Builder, name: str, config: Config, layers: Sequence[int]) -> None:
        """layers: indices of the hidden states to read. The first is the embedding and the last is the output of the
        last layer; negative indices count from the end."""
        self.is_clip = config.get("model_type", "clip_vision_model") == "clip_vision_model"
        count = config.get("num_hidden_layers", 12)
        sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, **config}
        hidden = sizes["hidden_size"]
        self.patch = sizes.get("patch_size", 32 if self.is_clip else 16)
        self.hidden_size = hidden
        eps = sizes.get("layer_norm_eps", 1e-5 if self.is_clip else 1e-6)
        activation = sizes.get("hidden_act", "quick_gelu" if self.is_clip else "gelu_pytorch_tanh")
        side = sizes.get("image_size", 224) // self.patch
        self.class_embedding = None
        if self.is_clip:
            self.class_embedding = builder.whole(f"{name}.embeddings.class_embedding", hidden)
            self.pre_norm = LayerNorm(builder, f"{name}.pre_layrnorm", hidden, eps)
        kernel = (self.patch, self.patch)
        self.patch_embedding = Linear(
            builder, f"{name}.embeddings.patch_embedding", 3 * self.patch**2, hidden, not self.is_clip, kernel
        )
        self.positions = builder.whole(f"{name}.embeddings.position_embedding.weight", side**2 + self.is_clip, hidden)
        self.read = [layer % (count + 1) for layer in layers]
        self.layers = [
            Layer(builder, f"{name}.encoder.layers.{i}", sizes, eps, activation) for i in range(max(self.read))
        ]

    def __call__(self, pixels: Tensor, places: Tensor | None = None) -> list[Tensor]:
        """pixels: [pictures, 3, side, side]; places: [patches], the rows of the table of positions, None for all in
        order -> the hidden states that are read: [pictures, tokens, hidden] each. With CLIP, the first token is the
        class token."""
        x = self.patch_embedding(patches(pixels.to(self.positions.dtype), self.patch)).flatten(1, 2)
        if self.class_embedding is not None:
            x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1)
        x = x + (self.positions if places is None else self.positions[places])
        if self.is_clip:
            x = self.pre_norm(x)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return [states[index] for index in self.read]
