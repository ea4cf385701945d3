"""Attention as data: what a model has, what one rank computes and keeps of it, and where a layer stands."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from quire.kvcache.specs import AttentionKVSpec, CacheEntry, LatentSpec, attention_spec
from quire.layers.specs import NormSpec, OutputPart

if TYPE_CHECKING:
    from quire.parallel.mesh import Communicator


@dataclass(frozen=True)
class CacheShape:
    """What one rank keeps of a token in one layer; value_dim: see AttentionShape.

    holds_positions: keys hold positions, which one byte cannot tell apart (see AlibiSlopes).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    holds_positions: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention as a model has it.

    qkv_layout: q, k, v as three tensors, as one after the other in the tensor "qkv", or in "qkv" by KV head (the query
    heads of a KV head, then its key, then its value). qk_norm: of queries and keys, over each head with one weight for
    all ("head") or one for each ("heads"), or over all heads as one vector ("all"). sinks: a learned logit a head that
    takes part in the softmax. alibi: see AlibiSlopes. transposed: the checkpoint keeps [in, out].
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

    def cache_shape(self, group: "Communicator") -> CacheShape:
        share = HeadShare.of(self, group)
        dim = self.head_dim + (2 if self.alibi else 0)
        return CacheShape(len(share.heads), len(share.kv_heads), dim, holds_positions=self.alibi)

    def kv_spec(self, layer: int, window: int | None) -> AttentionKVSpec:
        return attention_spec([layer], window)


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank. Where there are fewer KV heads than ranks, several ranks keep the same one."""

    heads: range
    kv_heads: range

    @classmethod
    def of(cls, spec: AttentionSpec, group: "Communicator") -> Self:
        """Raises ValueError if the heads cannot be shared evenly."""
        rank, size = group.rank, group.size
        if spec.num_heads % size or (spec.num_kv_heads % size and size % spec.num_kv_heads):
            raise ValueError(
                f"tensor_parallel_size={size} does not divide {spec.num_heads} attention heads and "
                f"{spec.num_kv_heads} KV heads"
            )
        heads, kv_heads = spec.num_heads // size, max(1, spec.num_kv_heads // size)
        start, kv_start = rank * heads, rank * spec.num_kv_heads // size
        return cls(range(start, start + heads), range(kv_start, kv_start + kv_heads))

    def parts(self, spec: AttentionSpec, names: dict[str, str]) -> list[OutputPart]:
        """Where the checkpoint has this rank's query, key and value heads, in that order."""
        dim, heads, kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads
        q, k = self.heads, self.kv_heads

        def rows(name: str, total: int, first: int, count: int) -> OutputPart:
            return OutputPart(names[name], total * dim, first * dim, (first + count) * dim)

        if spec.qkv_layout == "separate":
            return [
                rows(key, total, r.start, len(r))
                for key, total, r in (("q", heads, q), ("k", kv_heads, k), ("v", kv_heads, k))
            ]
        total = heads + 2 * kv_heads
        if spec.qkv_layout == "concatenated":
            starts = (q.start, heads + k.start, heads + kv_heads + k.start)
            return [rows("qkv", total, start, len(r)) for start, r in zip(starts, (q, k, k), strict=True)]
        group = heads // kv_heads
        queries = [rows("qkv", total, h // group * (group + 2) + h % group, 1) for h in q]
        return queries + [rows("qkv", total, h * (group + 2) + group + which, 1) for which in (0, 1) for h in k]


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention as a model has it.

    q_rank: None where queries are not compressed. nope_dim, rope_dim: parts of a query without and with rotation.
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
        """This rank's. Raises ValueError if they cannot be shared evenly."""
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
    """In what a layer's attention differs from the other layers'.

    window: tokens a query sees, None for all. rotary: index of its tables in ForwardState.rotary, None for a layer
    without. scale: a factor of its own for the scores.
    """

    kv_group: int
    window: int | None = None
    rotary: int | None = 0
    scale: float = 1.0
