"""Embeddings of tokens for each layer, and the branch of a layer that reads its own (Gemma 3n and 4)."""

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.linear import ReplicatedLinear
from quire.layers.mlp import activation
from quire.layers.norm import make_norm
from quire.layers.specs import NormSpec, PerLayerSpec


class PerLayerEmbedding:
    """A vector of each token for each layer: from a table, and from a projection of the token's embedding. names: the
    names of token_layers, layer_projection and layer_projection_norm."""

    def __init__(
        self, builder: Builder, spec: PerLayerSpec, layers: int, hidden: int, norm: NormSpec, names: dict[str, str]
    ) -> None:
        self.size = spec.size
        self.vocab_size = spec.vocab_size
        self.padding = spec.padding
        total = layers * spec.size
        self.table = VocabParallelEmbedding(builder, names["token_layers"], spec.vocab_size, total, is_head=False)
        self.projection = ReplicatedLinear(builder, names["layer_projection"], hidden, total)
        self.norm = make_norm(builder, names["layer_projection_norm"], spec.size, norm)
        # rounded to the model's type, as in training
        self.scale = torch.tensor(spec.size**0.5, dtype=builder.dtype, device=builder.device)
        self.projection_scale = hidden**-0.5

    def __call__(self, ids: Tensor, x: Tensor, slots: Tensor | None) -> Tensor:
        """ids: [tokens]; x: the tokens' embeddings, [tokens, hidden] -> [tokens, layers * size]"""
        projected = self.projection(x, slots) * self.projection_scale
        normed = self.norm(projected.view(len(ids), -1, self.size)).flatten(1)
        own = self.table(ids.masked_fill(ids >= self.vocab_size, 0))
        vectors: Tensor = (normed + own * self.scale) * 2.0**-0.5
        return vectors


class PerLayerBranch:
    """norm(out(act(gate(x)) * the layer's vector of the token)), whole on every rank. names: the names of layer_gate,
    layer_out and layer_norm."""

    def __init__(
        self, builder: Builder, spec: PerLayerSpec, index: int, hidden: int, norm: NormSpec, names: dict[str, str]
    ) -> None:
        self.kernels = builder.kernels
        self.part = slice(index * spec.size, (index + 1) * spec.size)
        self.gate = ReplicatedLinear(builder, names["layer_gate"], hidden, spec.size)
        self.activation = activation(builder.kernels, spec.activation, gated=False)
        self.out = ReplicatedLinear(builder, names["layer_out"], spec.size, hidden)
        self.norm = make_norm(builder, names["layer_norm"], hidden, norm)

    def __call__(self, x: Tensor, vectors: Tensor, slots: Tensor | None) -> Tensor:
        """x: [tokens, hidden]; vectors: of all layers, [tokens, layers * size] -> [tokens, hidden]"""
        gate = self.activation(self.gate(x, slots))
        out: Tensor = self.kernels.multiply(gate, vectors[:, self.part])
        return self.norm(self.out(out, slots))
