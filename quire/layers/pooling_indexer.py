"""The indexer of GLM-5-Next, which selects pools of consecutive tokens (attention/pooled.py).

A pool's key is a weighted sum of the keys of its tokens, with weights from a softmax over the tokens for each element.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.attention.pooled import PooledPlan, PooledSparseAttention
from quire.layers.attention_spec import IndexerSpec
from quire.layers.build import Builder
from quire.layers.linear import ReplicatedLinear
from quire.layers.norm import make_norm
from quire.layers.specs import NormSpec


class PoolingIndexer:
    """The indexer of one layer. names: the names of index_q, index_k, index_k_norm, index_weights, pool_positions and
    pool_gate."""

    def __init__(self, builder: Builder, spec: IndexerSpec, names: dict[str, str], hidden: int, q_rank: int) -> None:
        self.spec = spec
        dim = spec.head_dim
        self.q = ReplicatedLinear(builder, names["index_q"], q_rank, spec.num_heads * dim)
        self.k = ReplicatedLinear(builder, names["index_k"], hidden, dim)
        self.k_norm = make_norm(builder, names["index_k_norm"], dim, NormSpec("layer", spec.eps, bias=True))
        self.weights = ReplicatedLinear(builder, names["index_weights"], hidden, spec.num_heads)
        self.positions = builder.whole(names["pool_positions"], spec.pool, dim, dtype=torch.float32)
        self.gate = builder.whole(names["pool_gate"], dim, hidden)

    def bind(self, backend: PooledSparseAttention, cache: Tensor) -> None:
        """cache: the layer's entry for the indexer's rows."""
        self.cache = cache

    def select(
        self, x: Tensor, compressed: Tensor, slots: Tensor | None, rotary: Any, backend: Any, plan: PooledPlan
    ) -> None:
        """See Indexer.select. Nothing is rotated."""
        q = self.q(compressed, slots).view(len(x), self.spec.num_heads, self.spec.head_dim)
        rows = torch.cat((self.k_norm(self.k(x, slots)), functional.linear(x, self.gate)), 1)
        backend.select_pools(self.cache, rows, q, self.weights(x, slots), self._keys, plan)

    def _keys(self, rows: Tensor) -> Tensor:
        """rows: [pools, pool, 2 * dim] -> [pools, dim], float32"""
        k, gate = rows.float().chunk(2, -1)
        return ((gate + self.positions).softmax(1) * k).sum(1)
