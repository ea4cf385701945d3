"""Attention divided by heads: each rank attends to whole contexts with its share of the heads.

This follows DeepSpeed-Ulysses (arXiv:2309.14509). A rank computes the queries, keys and values of its own tokens in all
heads. An all-to-all exchanges these for all tokens in its own heads, and a second one exchanges the results back:

             heads 0  heads 1                   heads 0  heads 1
    tokens 0  rank 0   rank 0                    rank 0   rank 1
    tokens 1  rank 1   rank 1   all-to-all  ->   rank 0   rank 1
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionShape, Scores, StepLayout
from quire.attention.context import ContextAttention, Ints, packed, unpacked


@dataclass
class HeadwisePlan:
    inner: Any
    shares: Sequence[int]


class HeadwiseAttention(ContextAttention):
    """Divides the heads among the ranks of the group cp. The number of KV heads must be divisible by the number of
    ranks.

    The tokens of a step are split into equal contiguous parts: the first rank computes the first part.
    """

    how = "by heads"

    def inner_shape(self) -> AttentionShape:
        heads = self.shape.num_heads // self.cp.size
        kv_heads = self.shape.num_kv_heads // self.cp.size
        return replace(self.shape, num_heads=heads, num_kv_heads=kv_heads)

    def owners(self, positions: Ints) -> Ints:
        return np.arange(len(positions)) * self.cp.size // max(1, len(positions))

    def plan(self, layout: StepLayout, previous: Any = None) -> HeadwisePlan:
        return HeadwisePlan(self.inner.plan(layout), layout.shares)

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: HeadwisePlan) -> None:
        assert v is not None, "all heads share a latent"
        both = self._by_heads(torch.cat([k, v], dim=-1), plan)
        self.inner.store(cache, both[..., : k.shape[-1]], both[..., k.shape[-1] :], plan.inner)

    def attend(self, q: Tensor, cache: Tensor, plan: HeadwisePlan, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        if (sinks := scores.get("sinks")) is not None:
            scores["sinks"] = sinks.chunk(self.cp.size)[self.cp.rank]
        result = packed(*self.inner.attend(self._by_heads(q, plan), cache, plan.inner, **scores))
        count = plan.shares[self.cp.rank]
        by_rank = self.cp.all_to_all(result, plan.shares, [count] * self.cp.size).wait()
        result = by_rank.view(self.cp.size, count, *result.shape[1:]).transpose(0, 1).flatten(1, 2)
        return unpacked(result if count else result.new_zeros(len(q), *result.shape[1:]))

    def _by_heads(self, x: Tensor, plan: HeadwisePlan) -> Tensor:
        """[own tokens, all heads, ...] -> [all tokens, own heads, ...]"""
        count = plan.shares[self.cp.rank]
        size = self.cp.size
        by_rank = x[:count].reshape(count, size, x.shape[1] // size, x.shape[2]).transpose(0, 1).flatten(0, 1)
        return self.cp.all_to_all(by_rank, [count] * size, plan.shares).wait()
