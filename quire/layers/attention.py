"""The attention layer: projections, norms and rotation around a paged attention backend."""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.layers.build import Builder
from quire.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.parallel.mesh import TensorGroup


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention as a model has it. qk_norm_eps: None where q and k are not normed."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank. Where there are fewer KV heads than ranks, several ranks keep the same one."""

    num_heads: int
    num_kv_heads: int
    head_start: int
    kv_start: int

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
        return cls(heads, kv_heads, rank * heads, rank * spec.num_kv_heads // size)


@dataclass
class ForwardState:
    """What every layer of a step shares. plans: one a KV group."""

    cos: Tensor  # [tokens, rotary_dim / 2], float32
    sin: Tensor
    plans: list[Any]


class Attention:
    """The attention of one layer. names: of q, k, v, o in the checkpoint and, where they are normed, q_norm, k_norm."""

    def __init__(
        self, builder: Builder, spec: AttentionSpec, names: dict[str, str], window: int | None, kv_group: int
    ) -> None:
        share, head_dim = HeadShare.of(spec, builder.tensor_group), spec.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = share.num_heads, share.num_kv_heads, head_dim
        self.scale, self.window, self.kv_group = head_dim**-0.5, window, kv_group
        self.rotary_embedding = builder.kernels.rotary_embedding

        def part(key: str, total: int, start: int, count: int) -> OutputPart:
            return OutputPart(names[key], total * head_dim, start * head_dim, (start + count) * head_dim)

        parts = [
            part("q", spec.num_heads, share.head_start, share.num_heads),
            part("k", spec.num_kv_heads, share.kv_start, share.num_kv_heads),
            part("v", spec.num_kv_heads, share.kv_start, share.num_kv_heads),
        ]
        self.qkv = ColumnParallelLinear(builder, spec.hidden_size, parts, spec.qkv_bias)
        inputs = spec.num_heads * head_dim
        self.out = RowParallelLinear(builder, names["o"], inputs, spec.hidden_size, spec.output_bias, unit=head_dim)
        self.q_norm = self.k_norm = None
        if spec.qk_norm_eps is not None:
            self.q_norm = RMSNorm(builder, names["q_norm"], head_dim, spec.qk_norm_eps)
            self.k_norm = RMSNorm(builder, names["k_norm"], head_dim, spec.qk_norm_eps)
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
