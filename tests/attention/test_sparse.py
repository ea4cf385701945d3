"""Sparse attention of every backend against formulas that know nothing of pages, a token at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from attention.test_attention import BFLOAT16, CELLS, FLOAT32, NARROW, OF_FLOAT16, Kept
from attention.test_attention_invariance import BLOCK, layout_of
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape
from quire.attention.cells import from_bytes, to_bytes
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.attention.sparse import SparseAttention
from support.threads import thread_count

MIXED = [(0, 1), (40, 1), (0, 33), (90, 7), (3, 2)]  # (cached, new) tokens
TOP_K = 24


@dataclass
class SparseWorld:
    """Requests with latents and an indexer's keys in scattered blocks of memory full of NaN."""

    backend: type[AttentionBackend]
    kept: Kept
    requests: list[tuple[int, int]]
    top_k: int = TOP_K
    heads: int = 4
    dim: int = 40
    value_dim: int = 24
    index_heads: int = 5
    index_dim: int = 24
    same_keys: bool = False  # the indexer's keys are few different ones, so that many scores are equal
    invariant: bool = False
    sparse: SparseAttention = field(init=False)

    def __post_init__(self) -> None:
        dtype, cell = self.kept
        shape = AttentionShape(
            self.heads, 1, self.dim, BLOCK, dtype, torch.device("cpu"), self.value_dim, cell, self.invariant
        )
        if reason := self.backend.unsupported(shape):
            pytest.skip(reason)
        self.sparse = SparseAttention(shape, self.top_k, self.index_dim, self.backend)
        g = torch.Generator().manual_seed(3)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=g).to(dtype)

        lengths = [cached + new for cached, new in self.requests]
        self.latents = [draw(length, 1, self.dim) for length in lengths]
        self.keys = [draw(length, 1, self.index_dim) for length in lengths]
        if self.same_keys:
            self.keys = [keys[torch.arange(len(keys)) % 5] for keys in self.keys]
        self.q = [draw(length, self.heads, self.dim) for length in lengths]
        self.index_q = [draw(length, self.index_heads, self.index_dim) for length in lengths]
        self.weights = [draw(length, self.index_heads) for length in lengths]
        needed = [-(-length // BLOCK) for length in lengths]
        order = (torch.randperm(sum(needed) + 2, generator=g) + 1).tolist()
        self.table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
        for r, count in enumerate(needed):
            self.table[r, :count] = torch.tensor([order.pop() for _ in range(count)])
        sizes = [self.sparse.entry_bytes("kv"), self.sparse.entry_bytes("indexer")]
        self.memory = torch.full((sum(needed) + 3, sum(sizes)), 255, dtype=torch.uint8)
        self.cache = self.sparse.view(self.memory, 0)
        self.key_cache = self.sparse.of_role("indexer").view_at(self.memory, sizes[0])

    def run(self, parts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """A step with these parts of requests (request, first token, end): results and selected slots."""
        plan = self.sparse.plan(layout_of(self.table, parts))

        def of(tensors: list[Tensor]) -> Tensor:
            return torch.cat([tensors[r][begin:end] for r, begin, end in parts])

        self.sparse.store(self.cache, of(self.latents), None, plan)
        self.sparse.select_from(self.key_cache, of(self.index_q), of(self.weights), of(self.keys), plan)
        out, _ = self.sparse.attend(of(self.q), self.cache, plan, scale=0.2)
        return out, plan.selection.slots

    def stored(self, x: Tensor) -> Tensor:
        cell = self.kept.cell
        return x.float() if cell is None else from_bytes(to_bytes(x, cell), cell)

    def scores(self, r: int, position: int) -> list[float]:
        """Of the keys that a token sees."""
        keys = self.stored(self.keys[r][: position + 1, 0])
        products = torch.einsum("hd,kd->hk", self.index_q[r][position].float(), keys)
        return (products.clamp(min=0) * self.weights[r][position].float()[:, None]).sum(0).tolist()

    def wanted(self, r: int, position: int) -> tuple[Tensor, list[int]]:
        """The result of a token, and the positions that it selects, in order."""
        scores = self.scores(r, position)
        best = sorted(range(position + 1), key=lambda key: (-scores[key], key))[: self.top_k]
        chosen = sorted(best)
        latents = self.stored(self.latents[r][chosen, 0])
        weights = (self.q[r][position].float() @ latents.T * 0.2).softmax(-1)
        return weights @ latents[:, : self.value_dim], chosen

    def check(self, tolerance: float) -> None:
        self.run([(r, 0, cached) for r, (cached, _) in enumerate(self.requests) if cached])
        parts = [(r, cached, cached + new) for r, (cached, new) in enumerate(self.requests)]
        out, slots = self.run(parts)
        tokens = [(r, position) for r, begin, end in parts for position in range(begin, end)]
        for token, (r, position) in enumerate(tokens):
            result, chosen = self.wanted(r, position)
            expected = [int(self.table[r, p // BLOCK]) * BLOCK + p % BLOCK for p in chosen]
            assert slots[token, : len(expected)].tolist() == expected
            torch.testing.assert_close(out[token].float(), result, atol=tolerance, rtol=tolerance)

    def check_scores(self, tolerance: float) -> None:
        """Of the keys that are selected, if they are wanted; their numbers take the place of slots."""
        self.run([(r, 0, cached) for r, (cached, _) in enumerate(self.requests) if cached])
        parts = [(r, cached, cached + new) for r, (cached, new) in enumerate(self.requests)]
        self.run(parts)
        given = self.sparse.plan(layout_of(self.table, parts)).selection
        selection = replace(given, scores=torch.empty(given.slots.shape))
        q, weights = (torch.cat([x[r][b:e] for r, b, e in parts]) for x in (self.index_q, self.weights))
        self.sparse.keys.select(q, weights, self.key_cache, selection)
        tokens = [(r, position) for r, begin, end in parts for position in range(begin, end)]
        for token, (r, position) in enumerate(tokens):
            _, chosen = self.wanted(r, position)
            assert selection.slots[token, : len(chosen)].tolist() == chosen
            found, scores = selection.scores[token, : len(chosen)].tolist(), self.scores(r, position)
            assert found == pytest.approx([scores[key] for key in chosen], abs=tolerance, rel=tolerance)


@pytest.fixture(params=[ReferenceAttention, CpuAttention], ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    return request.param


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kept", [FLOAT32, BFLOAT16, NARROW, *CELLS, *OF_FLOAT16], ids=str)
def test_a_token_attends_to_the_tokens_with_the_highest_scores(backend, kept):
    SparseWorld(backend, kept, MIXED).check(1e-5 if kept.dtype is torch.float32 else 2e-2)


def test_the_scores_of_selected_keys(backend):
    SparseWorld(backend, FLOAT32, MIXED).check_scores(1e-4)


def test_of_equal_scores_the_first_win(backend):
    SparseWorld(backend, FLOAT32, MIXED, same_keys=True).check(1e-5)


@pytest.mark.parametrize("sizes", [(16, 576, 512, 64, 128), (3, 24, 24, 1, 16), (1, 33, 17, 7, 33)], ids=str)
def test_sizes(backend, sizes):
    heads, dim, value_dim, index_heads, index_dim = sizes
    SparseWorld(backend, FLOAT32, [(70, 2), (0, 20)], 16, heads, dim, value_dim, index_heads, index_dim).check(1e-4)


def test_short_texts_are_read_whole(backend):
    SparseWorld(backend, FLOAT32, [(0, 5), (9, 3)], top_k=64).check(1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kept", [BFLOAT16, CELLS[0], CELLS[-1], *OF_FLOAT16], ids=str)
def test_on_the_cpu_a_token_has_the_same_bits_in_any_step(kept):
    """Alone, in any chunk, with any number of threads; selections of several splits (see attention.h)."""
    requests = [(0, 2700), (0, 90)]

    def results(threads: int, steps: list[list[tuple[int, int, int]]]) -> list[Tensor]:
        world = SparseWorld(CpuAttention, kept, requests, top_k=600)
        with thread_count(threads):
            return [out for step in steps for out in world.run(step)[0].split([end - begin for _, begin, end in step])]

    whole = results(1, [[(0, 0, 2700)]])[0]
    parts = results(3, [[(0, 0, 700), (1, 0, 90)], [(0, 700, 701)], [(0, 701, 2699)], [(1, 5, 6), (0, 2699, 2700)]])
    assert torch.equal(torch.cat([parts[0], parts[2], parts[3], parts[5]]), whole)
