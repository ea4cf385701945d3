"""A block of attention and an MLP that several layers share (Zamba2, arXiv:2411.15242)."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from quire.layers.attention import Attention
from quire.layers.attention_spec import HeadShare, LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState
from quire.layers.linear import ColumnParallelLinear, ReplicatedLinear, inner_share
from quire.layers.mlp import MLP
from quire.layers.norm import make_norm
from quire.layers.specs import MLPSpec, NormSpec, OutputPart
from quire.layers.state_spec import SharedBlockSpec


class WithLowRank:
    """A shared product and a layer's own low-rank products, whose results follow each other and are added to it."""

    def __init__(
        self, builder: Builder, base: Any, inputs: int, rank: int, parts: Sequence[tuple[str, list[OutputPart]]]
    ) -> None:
        """parts: for each product, the name of its first factor, and the parts of its second one."""
        self.base = base
        self.kernels = builder.kernels
        self.factors = [
            (ReplicatedLinear(builder, name, inputs, rank), ColumnParallelLinear(builder, rank, outputs))
            for name, outputs in parts
        ]

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        own = torch.cat([second(first(x, slots), slots) for first, second in self.factors], 1)
        out: Tensor = self.kernels.add(self.base(x, slots), own, own)
        return out


class SharedBlock:
    """A layer's use of a shared block. Its input is the stream and the embeddings; its result is projected.

    names: the names of the attention, of its norm block_norm, of the MLP and mlp_norm, which all layers of a block
    share; of the layer's own block_out; and of the factors q_low, k_low, v_low and mlp_low, with {n} for the first (0)
    and the second (1).
    """

    def __init__(
        self, builder: Builder, spec: SharedBlockSpec, norm: NormSpec, names: dict[str, str], place: LayerPlace
    ) -> None:
        hidden = spec.attention.hidden_size
        self.stream = builder.residual_stream
        key = f"block {names['q']}"
        if key not in builder.shared:
            builder.shared[key] = (
                make_norm(builder, names["block_norm"], 2 * hidden, norm),
                Attention(builder, spec.attention, names, place),
                make_norm(builder, names["mlp_norm"], hidden, norm),
                MLP(builder, spec.mlp, hidden, names),
            )
        self.norm, attention, self.mlp_norm, mlp = builder.shared[key]
        self.attention: Attention = copy(attention)
        self.attention.place = place
        if spec.attention_rank:
            share = HeadShare.of(spec.attention, builder.tensor_group)
            low = {role: names[f"{role}_low"] for role in ("q", "k", "v")}
            outputs = share.parts(spec.attention, {role: name.replace("{n}", "1") for role, name in low.items()})
            parts = [(low[role].replace("{n}", "0"), [p]) for role, p in zip(low, outputs, strict=True)]
            self.attention.qkv = WithLowRank(builder, attention.qkv, 2 * hidden, spec.attention_rank, parts)
        self.mlp: MLP = copy(mlp)
        second = names["mlp_low"].replace("{n}", "1")
        parts = [(names["mlp_low"].replace("{n}", "0"), _halves(builder, spec.mlp, second, names["down"]))]
        self.mlp.up = WithLowRank(builder, mlp.up, hidden, spec.mlp_rank, parts)
        self.out = ReplicatedLinear(builder, names["block_out"], hidden, hidden)

    def __call__(self, x: Tensor, state: ForwardState) -> Tensor:
        """x: the stream and the embeddings of this rank's own tokens, [own tokens, 2 * hidden] -> [own tokens,
        hidden]"""
        stream = self.stream
        tokens = state.inputs.positions
        attended = stream.sum(self.attention(stream.whole(self.norm(x), tokens), state))
        made = stream.sum(self.mlp(stream.whole(self.mlp_norm(attended), tokens), state.slots))
        return self.out(made)


def _halves(builder: Builder, mlp: MLPSpec, name: str, reader: str) -> list[OutputPart]:
    """Return this rank's gates and other values of a tensor with both."""
    size = mlp.intermediate_size
    start, stop = inner_share(builder, size, reader)
    return [OutputPart(name, 2 * size, first + start, first + stop) for first in (0, size)]
