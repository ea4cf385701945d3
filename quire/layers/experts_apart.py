"""Routed experts as a branch beside the MLP, each with norms of its own (Gemma 4)."""

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.moe import MoE
from quire.layers.norm import make_norm
from quire.layers.specs import NormSpec


class ExpertsApart:
    """names: the names of dense_post_norm, experts_norm, experts_post_norm and router_scale."""

    def __init__(self, builder: Builder, moe: MoE, hidden: int, norm: NormSpec, names: dict[str, str]) -> None:
        self.moe = moe
        self.kernels = builder.kernels
        self.stream = builder.residual_stream
        self.eps = norm.eps
        self.dense_post_norm, self.experts_norm, self.experts_post_norm = (
            make_norm(builder, names[role], hidden, norm)
            for role in ("dense_post_norm", "experts_norm", "experts_post_norm")
        )
        self.router_scale = builder.whole(names["router_scale"], hidden, dtype=torch.float32)
        builder.when_loaded(lambda: self.router_scale.mul_(hidden**-0.5))  # type: ignore[arg-type]

    def __call__(self, x: Tensor, residual: Tensor, tokens: Tensor, slots: Tensor | None) -> Tensor:
        """x: the MLP's input, of this rank's tokens; residual: their stream; tokens: any tensor with a row for each
        token -> the sum of both branches, for this rank's tokens."""
        stream = self.stream
        assert self.moe.shared is not None
        dense = self.dense_post_norm(stream.sum(self.moe.shared(stream.whole(x, tokens), slots)))
        normed = stream.whole(self.experts_norm(residual), tokens)
        to_router = stream.whole(self.kernels.rms_norm(residual, self.router_scale, self.eps), tokens)
        routed = self.experts_post_norm(stream.sum(self.moe(normed, slots, to_router)))
        added: Tensor = self.kernels.add(dense, routed, dense)
        return added
