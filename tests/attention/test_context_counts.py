"""What ranks that divide a context exchange and compute, counted, against the formulas of the benchmark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_context import KERNELS, SIZES, Divided, divided

from benchmarks.context_parallel import seen_pairs, sent_by_decoding, sent_by_heads, sent_by_ring
from quire.attention.base import AttentionShape, StepLayout
from quire.attention.headwise import HeadwiseAttention
from quire.attention.reference import ReferenceAttention
from quire.attention.stripes import StripedAttention
from support.thread_group import ThreadGroup

REQUESTS = [(0, 48), (35, 36), (200, 1), (7, 11)]  # of cached and new tokens: 96 of these
HOW: Any = {"scale": 0.25}


def sent(world: Divided) -> list[list[int]]:
    """For each rank, the bytes that it sends to each other rank of its groups, in a layer of a step."""
    for groups in world.groups:
        for group in groups:
            group.sent.clear()
    world.step(world.world.requests, HOW)
    return [[bytes for group in groups for _, bytes in sorted(group.sent.items())] for groups in world.groups]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("latent", [False, True])
def test_a_ring_carries_queries_and_results(ranks, latent):
    """Each link carries the same, but for the ranks' numbers of tokens. Keys do not travel."""
    dim, value_dim = (40, 32) if latent else (16, None)
    world = divided(StripedAttention, ranks, 1, REQUESTS, ReferenceAttention, dim=dim, value_dim=value_dim)
    positions = np.concatenate([np.arange(cached, cached + new) for cached, new in REQUESTS])
    shares = np.bincount(world.backends[0].owners(positions)).tolist()
    for rank, links in enumerate(sent(world)):
        own = shares[rank]
        assert sum(links) == sent_by_ring(own, len(positions), ranks, 4, dim, value_dim or dim, 4)
        others = [own * 4 * dim * 4 + share * 4 * ((value_dim or dim) + 1) * 4 for share in shares]
        assert links == others[:rank] + others[rank + 1 :]


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (2, 4), (4, 4)])
def test_by_heads_ranks_exchange_so_many_times_less(ranks, kv_heads):
    world = divided(HeadwiseAttention, ranks, 1, REQUESTS, ReferenceAttention, heads=8, kv_heads=kv_heads)
    for links in sent(world):
        assert sum(links) == sent_by_heads(96 // ranks, 96, ranks, 8, kv_heads, 16, 4)
        assert len({*links}) == 1
        assert sum(links) <= (1 + kv_heads / 8) / ranks * sent_by_ring(96 // ranks, 96, ranks, 8, 16, 16, 4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_decoding_exchanges_queries_and_results(ranks):
    world = divided(StripedAttention, 1, ranks, REQUESTS, ReferenceAttention, dim=40, value_dim=32)
    for links in sent(world):
        assert sum(links) == sent_by_decoding(96, ranks, 4, 40, 32, 4)
        assert len({*links}) == 1


class Counting(ReferenceAttention):
    """Counts the pairs of a query and a key that it is asked to compute, and computes nothing."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.pairs = 0

    def attend(self, q: Any, cache: Any, plan: StepLayout, **how: Any) -> Any:
        counts, lengths = plan.query_start_loc.diff().long(), plan.seq_lens.long()
        self.pairs += int((counts * lengths - counts * (counts - 1) // 2).sum())
        return torch.zeros(*q.shape[:2], self.shape.out_dim), torch.zeros(q.shape[:2])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("cp", "dcp"), SIZES)
@pytest.mark.parametrize("request_", [(0, 4096), (100_000, 777), (31, 64), (5000, 1)])
def test_all_ranks_have_the_same_work_to_within_one_key_for_each_query(cp, dcp, request_):
    (cached, new), ranks = request_, cp * dcp
    shape = AttentionShape(1, 1, 4, 16, torch.float32, torch.device("cpu"))
    positions, pairs = np.arange(cached, cached + new), []
    layout = StepLayout(
        torch.tensor([0, new]).int(),
        torch.tensor([cached + new]).int(),
        torch.from_numpy(positions),
        torch.zeros(1, 20_000, dtype=torch.int32),
    )
    for rank in range(ranks):
        groups = ThreadGroup(rank // dcp, cp), ThreadGroup(rank % dcp, dcp)
        backend = StripedAttention(shape, *groups, Counting, KERNELS)
        shares = np.bincount(backend.owners(positions), minlength=cp).tolist()
        assert max(shares) - min(shares) <= dcp
        plan = backend.plan(replace(layout, shares=shares) if cp > 1 else layout)
        for queries, count in zip(plan.queries, plan.shares, strict=True):
            parts = backend._parts(layout, *queries, None)
            backend._attend(torch.zeros(count, dcp, 4), torch.empty(0), parts, HOW)
        pairs.append(backend.inner.pairs)
        assert pairs[-1] == seen_pairs(cached, new, ranks, rank)
    assert sum(pairs) == sum(position + 1 for position in positions.tolist()) == seen_pairs(cached, new)
    assert max(pairs) - min(pairs) <= new
