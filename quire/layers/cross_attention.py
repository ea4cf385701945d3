"""Attention of a decoder to the output of an encoder (arXiv:1706.03762)."""

from typing import Any

from torch import Tensor

from quire.layers.attention import CachedAttention
from quire.layers.attention_spec import AttentionSpec, HeadShare
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear


class CrossAttention(CachedAttention):
    """The cross-attention of one layer, with the sizes of its self-attention. The keys and values of the encoder's
    tokens are stored once for a request, and read in each of its steps."""

    def __init__(self, builder: Builder, spec: AttentionSpec, names: dict[str, str], group: int) -> None:
        """names: the names of cross_q, cross_k, cross_v and cross_o in the checkpoint. group: the KV group."""
        share = HeadShare.of(spec, builder.tensor_group)
        dim = spec.head_dim
        hidden = spec.hidden_size
        self.num_heads = len(share.heads)
        self.num_kv_heads = len(share.kv_heads)
        self.head_dim = dim
        self.group = group
        self.scale = dim**-0.5 if spec.scale is None else spec.scale
        own = {role.removeprefix("cross_"): name for role, name in names.items() if role.startswith("cross_")}
        q, *kv = share.parts(spec, own)
        self.q = ColumnParallelLinear(builder, hidden, [q], spec.qkv_bias)
        self.kv = ColumnParallelLinear(builder, hidden, kv, spec.qkv_bias)
        inner = (share.heads.start * dim, share.heads.stop * dim)
        self.out = RowParallelLinear(
            builder, own["o"], spec.num_heads * dim, inner, hidden, spec.output_bias, is_copy=share.is_copy
        )

    def store(self, states: Tensor, plan: Any, slots: Tensor | None) -> None:
        """states: the encoder's output, [encoder tokens, hidden]. plan: see store_plan. slots: the adapters' slots."""
        assert self.backend is not None, "bind the cache first"
        assert self.cache is not None
        kv = self.kv(states, slots).view(len(states), 2 * self.num_kv_heads, self.head_dim)
        self.backend.store(self.cache, kv[:, : self.num_kv_heads], kv[:, self.num_kv_heads :], plan)

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand."""
        assert self.backend is not None, "bind the cache first"
        assert self.cache is not None
        q = self.q(x, state.slots).view(len(x), self.num_heads, self.head_dim)
        out, _ = self.backend.attend(q, self.cache, state.plans[self.group], scale=self.scale)
        return self.out(pick(out[..., : self.head_dim].flatten(1), wanted), state.slots_of(wanted))
