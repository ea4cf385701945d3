"""The attention layer: projections, norms and rotation around a paged attention backend."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, Preparation, PreparingBackend
from quire.layers.build import Builder
from quire.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from quire.layers.norm import NormSpec, RMSNorm
from quire.layers.qk_norm import make_qk_norm
from quire.parallel.mesh import TensorGroup


@dataclass(frozen=True)
class CacheShape:
    """What one rank keeps of a token in one layer; value_dim: see AttentionShape."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None


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

    def cache_shape(self, group: TensorGroup) -> CacheShape:
        share = HeadShare.of(self, group)
        return CacheShape(len(share.heads), len(share.kv_heads), self.head_dim + (2 if self.alibi else 0))


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank. Where there are fewer KV heads than ranks, several ranks keep the same one."""

    heads: range
    kv_heads: range

    @classmethod
    def of(cls, spec: AttentionSpec, group: TensorGroup) -> Self:
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


@dataclass
class ForwardState:
    """What every layer of a step shares. rotary: cos and sin [tokens, rotary_dim / 2], float32, of each of the model's
    variants; plans: one a KV group."""

    positions: Tensor  # [tokens]
    rotary: list[tuple[Tensor, Tensor]]
    plans: list[Any]


def pick(x: Tensor, rows: Tensor | None) -> Tensor:
    """x[rows]; x itself for None."""
    return x if rows is None else x.index_select(0, rows)


class AlibiSlopes:
    """Attention with linear biases (arXiv:2108.12409): a head's scores grow by slope * (position of the key).

    No backend knows of it: every head gets two more elements, slopes in the query and the position in the key, in two
    digits so that bfloat16 holds it exactly up to 65,536. The values get zeros.
    """

    def __init__(self, num_heads: int, heads: range, builder: Builder) -> None:
        """Slopes are a geometric series; beyond a power of two, every other one of the next finer series."""
        power = 1 << (num_heads.bit_length() - 1)
        slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
        slopes += [2.0 ** (-4 * (i + 1) / power) for i in range(0, 2 * (num_heads - power), 2)]
        mine = torch.tensor(slopes[heads.start : heads.stop], dtype=builder.dtype, device=builder.device)
        self.slopes = mine[None, :, None].expand(1, -1, 2)  # [1, heads, 2]

    def extend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v: [tokens, heads, head_dim], positions: [tokens] -> [tokens, heads, head_dim + 2] each"""
        low = positions & 255
        digits = torch.stack([positions - low, low], dim=-1).to(k.dtype)[:, None]  # [tokens, 1, 2]
        slopes, digits = self.slopes.expand(len(q), -1, -1), digits.expand(-1, k.shape[1], -1)
        return torch.cat([q, slopes], -1), torch.cat([k, digits], -1), torch.nn.functional.pad(v, (0, 2))


class CachedAttention:
    """What all kinds of attention have in common: a layer's place in the cache."""

    backend: AttentionBackend | None = None  # set with the cache, when its size is known
    cache: Tensor | None = None

    def bind(self, backend: AttentionBackend, cache: Tensor) -> None:
        self.backend, self.cache = backend, cache


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


class Attention(CachedAttention):
    """The attention of one layer. names: of its tensors in the checkpoint, by role."""

    def __init__(self, builder: Builder, spec: AttentionSpec, names: dict[str, str], place: LayerPlace) -> None:
        share, dim = HeadShare.of(spec, builder.tensor_group), spec.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = len(share.heads), len(share.kv_heads), dim
        self.place, self.soft_cap, self.interleaved = place, spec.soft_cap, spec.interleaved_rotary
        self.scale = (dim**-0.5 if spec.scale is None else spec.scale) * place.scale
        self.kernels = builder.kernels
        hidden, transposed = spec.hidden_size, spec.transposed
        self.qkv = ColumnParallelLinear(builder, hidden, share.parts(spec, names), spec.qkv_bias, transposed)
        inputs = spec.num_heads * dim
        self.out = RowParallelLinear(builder, names["o"], inputs, hidden, spec.output_bias, dim, transposed)
        self.q_norm = self.k_norm = None
        if (norm := spec.qk_norm) is not None:
            over = spec.qk_norm_over
            self.q_norm = make_qk_norm(builder, names["q_norm"], norm, over, dim, spec.num_heads, share.heads)
            self.k_norm = make_qk_norm(builder, names["k_norm"], norm, over, dim, spec.num_kv_heads, share.kv_heads)
        self.alibi = AlibiSlopes(spec.num_heads, share.heads, builder) if spec.alibi else None
        self.sinks = None
        if spec.sinks:
            self.sinks = builder.parameter(self.num_heads, dtype=torch.float32)
            builder.part(names["sinks"], self.sinks, (spec.num_heads,), slice(share.heads.start, share.heads.stop))

        self.preparing: PreparingBackend | None = None  # where norms, rotation and storing can be one pass

    def bind(self, backend: AttentionBackend, cache: Tensor) -> None:
        super().bind(backend, cache)
        norms, chosen = (self.q_norm, self.k_norm), self.kernels.chosen
        by_head = norms == (None, None) or all(isinstance(norm, RMSNorm) for norm in norms)
        if not isinstance(backend, PreparingBackend) or not by_head or self.alibi is not None:
            return
        if chosen["rms_norm"] == chosen["rotary_embedding"] == backend.kernels:
            self.preparing = backend

    def __call__(self, x: Tensor, state: ForwardState, rows: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden], or of `rows` alone; all tokens are stored"""
        assert self.backend is not None, "bind the cache first"
        assert self.cache is not None
        tokens, heads, kv_heads, place = x.shape[0], self.num_heads, self.num_kv_heads, self.place
        qkv = self.qkv(x).view(tokens, heads + 2 * kv_heads, self.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        plan = state.plans[place.kv_group]
        if self.preparing is not None:
            self.preparing.prepare(self.cache, q, k, v, plan, self._preparation(state))
        else:
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            if place.rotary is not None:
                q, k = self.kernels.rotary_embedding(q, k, *state.rotary[place.rotary], self.interleaved)
            if self.alibi is not None:
                q, k, v = self.alibi.extend(q, k, v, state.positions)
            self.backend.store(self.cache, k, v, plan)
        out, _ = self.backend.attend(
            q, self.cache, plan, scale=self.scale, window=place.window, soft_cap=self.soft_cap, sinks=self.sinks
        )
        return self.out(pick(out[..., : self.head_dim].reshape(tokens, heads * self.head_dim), rows))

    def _preparation(self, state: ForwardState) -> Preparation:
        cos, sin = (None, None) if self.place.rotary is None else state.rotary[self.place.rotary]
        if not (isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)):
            return Preparation(None, None, 0.0, cos, sin, self.interleaved)
        return Preparation(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, cos, sin, self.interleaved)
