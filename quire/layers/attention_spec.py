"""Attention as data: the model's attention, the share of it on one rank, and what differs from layer to layer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from quire.kvcache.specs import AttentionKVSpec, CacheEntry, LatentSpec, attention_spec
from quire.layers.specs import NormSpec, OutputPart

if TYPE_CHECKING:
    from quire.parallel.mesh import Communicator


@dataclass(frozen=True)
class CacheShape:
    """What one rank caches of a token in one layer. value_dim: see AttentionShape.

    holds_positions: keys contain token positions, which need more than one byte an element (see AlibiSlopes).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    holds_positions: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """The grouped-query attention of a model.

    qkv_layout: q, k and v are three tensors ("separate"), follow each other in the tensor "qkv" ("concatenated"), or
    are ordered by KV head in "qkv": its query heads, its key, its value ("by_kv_head"). qk_norm: of queries and keys.
    qk_norm_over: the norm is taken over each head with one weight for all heads ("head"), over each head with a weight
    of its own ("heads"), or over all heads as one vector ("all"). sinks: each head has a learned logit that takes part
    in the softmax. alibi: see AlibiSlopes. transposed: the checkpoint keeps [in, out]. input_size: width of the vectors
    from which q, k and v are computed, None for hidden_size. is_causal: False for encoders, whose tokens also see those
    behind them, and cache nothing.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qkv_layout: Literal["separate", "concatenated", "by_kv_head"] = "separate"
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "heads", "all"] = "head"
    interleaved_rotary: bool = False
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    transposed: bool = False
    input_size: int | None = None
    is_causal: bool = True

    def cache_shape(self, group: "Communicator") -> CacheShape:
        share = HeadShare.of(self, group)
        dim = self.head_dim + (2 if self.alibi else 0)
        return CacheShape(len(share.heads), len(share.kv_heads), dim, holds_positions=self.alibi)

    def kv_spec(self, layer: int, window: int | None) -> AttentionKVSpec:
        return attention_spec([layer], window)


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank. If there are fewer KV heads than ranks, several ranks hold the same KV head."""

    heads: range
    kv_heads: range

    @classmethod
    def of(cls, spec: AttentionSpec, group: "Communicator") -> Self:
        """The share of the group's rank. Raises ValueError if the heads cannot be shared evenly."""
        rank, size = group.rank, group.size
        if spec.num_heads % size or (spec.num_kv_heads % size and size % spec.num_kv_heads):
            raise ValueError(f"tensor_parallel_size={size} does not divide {spec.num_heads} attention heads and "
                             f"{spec.num_kv_heads} KV heads")  # fmt: skip
        heads, kv_heads = spec.num_heads // size, max(1, spec.num_kv_heads // size)
        start, kv_start = rank * heads, rank * spec.num_kv_heads // size
        return cls(range(start, start + heads), range(kv_start, kv_start + kv_heads))

    def parts(self, spec: AttentionSpec, names: dict[str, str]) -> list[OutputPart]:
        """The parts of the checkpoint's tensors with this rank's query, key and value heads, in that order."""
        dim, heads, kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads
        q, k = self.heads, self.kv_heads

        def part(name: str, total: int, first: int, count: int) -> OutputPart:
            return OutputPart(names[name], total * dim, first * dim, (first + count) * dim)

        if spec.qkv_layout == "separate":
            return [
                part(key, total, r.start, len(r))
                for key, total, r in (("q", heads, q), ("k", kv_heads, k), ("v", kv_heads, k))
            ]
        total = heads + 2 * kv_heads
        if spec.qkv_layout == "concatenated":
            starts = (q.start, heads + k.start, heads + kv_heads + k.start)
            return [part("qkv", total, start, len(r)) for start, r in zip(starts, (q, k, k), strict=True)]
        group = heads // kv_heads
        queries = [part("qkv", total, h // group * (group + 2) + h % group, 1) for h in q]
        return queries + [part("qkv", total, h * (group + 2) + group + which, 1) for which in (0, 1) for h in k]


@dataclass(frozen=True)
class LatentAttentionSpec:
    """The multi-head latent attention of a model.

    q_rank: None if queries are not compressed. nope_dim, rope_dim: elements of a query without and with rotation.
    """

    hidden_size: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: NormSpec
    scale: float
    bias: bool = False
    interleaved_rotary: bool = True

    def heads(self, group: "Communicator") -> range:
        """This rank's heads. Raises ValueError if they cannot be shared evenly."""
        if self.num_heads % group.size:
            raise ValueError(f"tensor_parallel_size={group.size} does not divide {self.num_heads} attention heads")
        count = self.num_heads // group.size
        return range(group.rank * count, (group.rank + 1) * count)

    def cache_shape(self, group: "Communicator") -> CacheShape:
        return CacheShape(len(self.heads(group)), 1, self.kv_rank + self.rope_dim, self.kv_rank)

    def kv_spec(self, layer: int, window: int | None) -> AttentionKVSpec:
        return LatentSpec((CacheEntry(layer),))


@dataclass(frozen=True)
class LayerPlace:
    """What distinguishes the attention of one layer from that of the other layers.

    window: number of tokens that a query sees, None for all. rotary: index of the layer's tables in
    ForwardState.rotary, None for a layer without rotary embedding. scale: the layer's own factor for the scores.
    """

    kv_group: int
    window: int | None = None
    rotary: int | None = 0
    scale: float = 1.0
