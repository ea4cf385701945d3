"""The attention layer: projections, norms and rotation around a paged attention backend."""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.layers.build import Builder
from quire.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from quire.layers.norm import RMSNorm


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank. Where there are fewer KV heads than ranks, several ranks keep the same one."""

    num_heads: int
    num_kv_heads: int
    head_start: int
    kv_start: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Self:
        """Raises ValueError if the heads cannot be shared evenly."""
        if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
            raise ValueError(
                f"tensor_parallel_size={size} does not divide {num_heads} attention heads and {num_kv_heads} KV heads"
            )
        heads, kv_heads = num_heads // size, max(1, num_kv_heads // size)
        return cls(heads, kv_heads, rank * heads, rank * num_kv_heads // size)


@dataclass
class ForwardState:
    """What every layer of a step shares. plans: one a KV group."""

    positions: Tensor  # [tokens], int64
    cos: Tensor  # [tokens, rotary_dim / 2], float32
    sin: Tensor
    plans: list[Any]


class Attention:
    """Grouped-query attention of one layer."""

    def __init__(
        self,
        builder: Builder,
        *,
        names: dict[str, str],
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        kv_group: int,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None,
    ) -> None:
        """names: checkpoint names of q, k, v, o and, with qk_norm_eps, q_norm and k_norm."""
        tp = builder.tensor_group
        share = HeadShare.of(num_heads, num_kv_heads, tp.rank, tp.size)
        self.num_heads, self.num_kv_heads, self.head_dim = share.num_heads, share.num_kv_heads, head_dim
        self.scale, self.window, self.kv_group = scale, window, kv_group
        self.rotary_embedding = builder.kernels.rotary_embedding

        def part(key: str, total: int, start: int, count: int) -> OutputPart:
            return OutputPart(names[key], total * head_dim, start * head_dim, (start + count) * head_dim)

        parts = [
            part("q", num_heads, share.head_start, share.num_heads),
            part("k", num_kv_heads, share.kv_start, share.num_kv_heads),
            part("v", num_kv_heads, share.kv_start, share.num_kv_heads),
        ]
        self.qkv = ColumnParallelLinear(builder, hidden_size, parts, qkv_bias)
        self.out = RowParallelLinear(builder, names["o"], num_heads * head_dim, hidden_size, output_bias, head_dim)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(builder, names["q_norm"], head_dim, qk_norm_eps)
            self.k_norm = RMSNorm(builder, names["k_norm"], head_dim, qk_norm_eps)
        self.backend: AttentionBackend | None = None  # set with the cache, when its size is known
        self.cache: Tensor | None = None

    def bind(self, backend: AttentionBackend, cache: Tensor) -> None:
        self.backend, self.cache = backend, cache

    def __call__(self, x: Tensor, state: ForwardState) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]"""
        assert self.backend is not None, "bind the cache first"
        assert self.cache is not None
        tokens, heads, kv_heads = x.shape[0], self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(tokens, heads + 2 * kv_heads, self.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_embedding(q, k, state.cos, state.sin)
        plan = state.plans[self.kv_group]
        self.backend.store(self.cache, k, v, plan)
        out, _ = self.backend.attend(q, self.cache, plan, scale=self.scale, window=self.window)
        return self.out(out.view(tokens, heads * self.head_dim))
