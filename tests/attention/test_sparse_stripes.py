"""Sparse attention whose context is divided among ranks, against formulas that know of neither ranks nor pages.

The ranks are threads. Each has a cache of its own, full of NaN where it was not told to store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention.test_attention import BFLOAT16, CELLS, FLOAT32, OF_FLOAT16, Kept
from attention.test_sparse import MIXED, SparseWorld
from torch import Tensor

import quire.attention.sparse_stripes
from quire.attention.base import AttentionBackend, StepLayout
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.attention.sparse_stripes import StripedSparseAttention
from quire.ops import Kernels, Target
from support.thread_group import Meeting, ThreadGroup, on_every_rank

KERNELS = Kernels(Target(torch.device("cpu"), torch.float32))
BLOCK = 16  # of a rank
SIZES = [(1, 2), (1, 4), (2, 1), (3, 1), (2, 2), (3, 2)]  # of cp and dcp
Parts = Sequence[tuple[int, int, int]]  # request, first token, end


class DividedWorld:
    """The requests of a SparseWorld on cp * dcp ranks. Each rank of a group dcp has an equal share of the heads."""

    def __init__(self, cp: int, dcp: int, world: SparseWorld) -> None:
        self.world, self.cp, self.dcp = world, cp, dcp
        rows, columns = [Meeting(dcp) for _ in range(cp)], [Meeting(cp) for _ in range(dcp)]
        ranks = [divmod(rank, dcp) for rank in range(cp * dcp)]
        self.groups = [(ThreadGroup(c, cp, None, columns[d]), ThreadGroup(d, dcp, None, rows[c])) for c, d in ranks]
        self.heads = world.heads // dcp
        shape = replace(world.sparse.shape, num_heads=self.heads, block_size=BLOCK)
        self.backends = [
            StripedSparseAttention(shape, *groups, world.backend, KERNELS, world.top_k, world.index_dim)
            for groups in self.groups
        ]
        sizes = [self.backends[0].entry_bytes(role) for role in ("kv", "indexer")]
        memories = [torch.full((len(world.memory), sum(sizes)), 255, dtype=torch.uint8) for _ in ranks]
        self.caches = [
            (backend.view(memory, 0), backend.of_role("indexer").view_at(memory, sizes[0]))
            for backend, memory in zip(self.backends, memories, strict=True)
        ]

    def layout(self, parts: Parts) -> StepLayout:
        size = BLOCK * self.cp * self.dcp
        places = [(self.world.table[r], torch.arange(start, stop)) for r, start, stop in parts]
        slots = torch.cat([row[place // size].long() * size + place % size for row, place in places])
        counts = [stop - start for _, start, stop in parts]
        return StepLayout(
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor([stop for *_, stop in parts], dtype=torch.int32),
            slots,
            self.world.table[[r for r, *_ in parts]].contiguous(),
            tokens_per_request=counts[0] if len(set(counts)) == 1 else 0,
        )

    def run(self, parts: Parts, selections: int = 1) -> Tensor:
        """The results of a step, [tokens, heads, value_dim]. selections: how many layers select in it."""
        world, layout = self.world, self.layout(parts)
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts])

        def of(tensors: list[Tensor]) -> Tensor:
            return torch.cat([tensors[r][start:stop] for r, start, stop in parts])

        def rank(group: ThreadGroup) -> tuple[Any, ...]:
            backend, (cache, keys), (cp, dcp) = (x[group.rank] for x in (self.backends, self.caches, self.groups))
            owners = backend.owners(positions)
            tokens = np.flatnonzero(owners == cp.rank)
            given = tokens if len(tokens) else [0]  # at least one token goes through the layers
            shares = np.bincount(owners, minlength=cp.size).tolist()
            plan = backend.plan(replace(layout, shares=shares) if cp.size > 1 else layout)
            backend.store(cache, of(world.latents)[given], None, plan)
            index = [of(x)[given] for x in (world.index_q, world.weights, world.keys)]
            for _ in range(selections - 1):  # another layer, which selects other tokens
                backend.select_from(keys, -index[0], index[1], index[2], plan)
            backend.select_from(keys, *index, plan)
            group._exchange(None)  # every rank has stored
            own = slice(dcp.rank * self.heads, (dcp.rank + 1) * self.heads)
            out, _ = backend.attend(of(world.q)[given][:, own], cache, plan, scale=0.2)
            assert out.shape == (len(given), self.heads, world.value_dim)
            return tokens, own, out[: len(tokens)]

        results = torch.full((len(positions), world.heads, world.value_dim), float("nan"))
        for tokens, own, out in on_every_rank(self.cp * self.dcp, rank):
            results[tokens, own] = out.float()
        return results

    def check(self, tolerance: float = 1e-5, selections: int = 1) -> None:
        world = self.world
        if cached := [(r, 0, count) for r, (count, _) in enumerate(world.requests) if count]:
            self.run(cached)
        parts = [(r, count, count + new) for r, (count, new) in enumerate(world.requests)]
        tokens = [(r, position) for r, start, stop in parts for position in range(start, stop)]
        for out, (r, position) in zip(self.run(parts, selections), tokens, strict=True):
            torch.testing.assert_close(out, world.wanted(r, position)[0], atol=tolerance, rtol=tolerance)


def divided(cp: int, dcp: int, requests: list[tuple[int, int]], **world: Any) -> DividedWorld:
    given: dict[str, Any] = {"backend": CpuAttention, "kept": FLOAT32, **world}
    return DividedWorld(cp, dcp, SparseWorld(given.pop("backend"), given.pop("kept"), requests, heads=4, **given))


@pytest.fixture(params=[CpuAttention, ReferenceAttention], ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    return request.param


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("cp", "dcp"), [size for size in SIZES if 4 % size[1] == 0])
def test_ranks_together_select_the_tokens_with_the_highest_scores(backend, cp, dcp):
    divided(cp, dcp, MIXED, backend=backend).check()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kept", [BFLOAT16, *CELLS, *OF_FLOAT16], ids=str)
@pytest.mark.parametrize(("cp", "dcp"), [(1, 2), (2, 2)])
def test_every_type_of_cache_can_be_divided(backend, kept: Kept, cp, dcp):
    divided(cp, dcp, MIXED, backend=backend, kept=kept).check(2e-2)


@pytest.mark.parametrize(("cp", "dcp"), [(1, 2), (3, 1), (2, 2)])
def test_of_equal_scores_the_first_in_the_whole_text_win(backend, cp, dcp):
    divided(cp, dcp, MIXED, backend=backend, same_keys=True).check()


def test_some_ranks_have_no_key_and_no_token(backend):
    for requests in ([(0, 1)], [(0, 2), (1, 1)], [(2, 1), (60, 1)]):
        divided(2, 2, requests, backend=backend, top_k=8).check()


def test_short_texts_are_read_whole(backend):
    divided(1, 4, [(0, 5), (9, 3)], backend=backend, top_k=64).check()


def test_candidates_are_compared_for_some_tokens_at_a_time(backend, monkeypatch):
    monkeypatch.setattr(quire.attention.sparse_stripes, "_MOST_CANDIDATES", 300)
    divided(2, 2, MIXED, backend=backend).check()


def test_each_layer_selects_anew(backend):
    divided(1, 2, [(90, 1), (70, 1)], backend=backend).check(selections=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_any_chunks_of_any_requests(seed):
    draw = np.random.default_rng(seed)
    cp, dcp = SIZES[seed % len(SIZES)]
    requests = [(int(draw.integers(0, 300)), int(draw.integers(1, 60))) for _ in range(draw.integers(1, 9))]
    divided(cp, dcp, requests, top_k=int(draw.integers(1, 100))).check()
