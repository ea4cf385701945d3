"""Norms of queries and keys."""

from collections.abc import Callable

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.norm import Norm, make_norm
from quire.layers.specs import NormSpec

QKNorm = Callable[[Tensor], Tensor]  # [tokens, heads, head_dim] -> the same


def make_qk_norm(
    builder: Builder,
    name: str | None,
    spec: NormSpec,
    over: str,
    head_dim: int,
    num_heads: int,
    heads: range,
    weight: float,
) -> QKNorm:
    """over: see AttentionSpec.qk_norm_over. heads: this rank's heads, out of num_heads. weight: the weight of this
    rank's heads in a sum over all ranks, so that each head counts once. name: None for the identity."""
    if name is None:
        return Norm(builder.kernels)
    if over == "head":
        return make_norm(builder, name, head_dim, spec)
    if over == "heads":
        return NormOfEachHead(builder, name, spec, head_dim, num_heads, heads)
    return RMSNormOfAllHeads(builder, name, spec, head_dim, num_heads, heads, weight)


class NormOfEachHead:
    """A layer norm without bias whose weight differs by head (Cohere). The checkpoint's weight: [heads, dim]."""

    def __init__(
        self, builder: Builder, name: str, spec: NormSpec, head_dim: int, num_heads: int, heads: range
    ) -> None:
        self.kernels = builder.kernels
        self.eps = spec.eps
        self.weight = builder.parameter(len(heads), head_dim)
        if "{h}" in name:  # StableLM: one tensor for each head. Tensors of other ranks' heads fill empty slots.
            for head in range(num_heads):
                target = self.weight[head - heads.start] if head in heads else self.weight.new_empty(0)
                builder.part(f"{name.replace('{h}', str(head))}.weight", target, (head_dim,), slice(len(target)))
        else:
            builder.part(f"{name}.weight", self.weight, (num_heads, head_dim), slice(heads.start, heads.stop))

    def __call__(self, x: Tensor) -> Tensor:
        normed: Tensor = self.kernels.layer_norm(x, self.weight, None, self.eps)
        return normed


class RMSNormOfAllHeads:
    """An RMS norm over the heads of all ranks as one vector (OLMo-2). The checkpoint's weight: [heads * head_dim]."""

    def __init__(
        self, builder: Builder, name: str, spec: NormSpec, head_dim: int, num_heads: int, heads: range, weight: float
    ) -> None:
        """weight: see make_qk_norm."""
        self.eps = spec.eps
        self.group = builder.tensor_group
        self.size = num_heads * head_dim
        self.kernels = builder.kernels
        self.weight = builder.parameter(len(heads), head_dim, dtype=torch.float32)
        share = slice(heads.start * head_dim, heads.stop * head_dim)
        builder.part(f"{name}.weight", self.weight.view(-1), (self.size,), share)
        self.own_weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            normed: Tensor = self.kernels.rms_norm(x.flatten(1), self.weight.view(-1), self.eps)
            return normed.view(x.shape)
        wide = x.float()
        squares = self.kernels.row_sums(wide.square().flatten(1)) * self.own_weight
        squares = self.group.all_reduce(squares)[..., None]
        return (wide * torch.rsqrt(squares / self.size + self.eps) * self.weight).to(x.dtype)
