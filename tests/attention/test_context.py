"""Attention whose context is divided among ranks, against attention that knows of neither ranks nor pages.

The ranks are threads. Each has a cache of its own, full of NaN where it was not told to store.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_attention import BFLOAT16, CELLS, FLOAT32, MIXED, NARROW, Kept, World, allocate, dense

from quire.attention.base import AttentionBackend, AttentionShape, Scores
from quire.attention.cells import from_bytes, to_bytes
from quire.attention.context import ContextAttention, packed, unpacked
from quire.attention.cpu import CpuAttention
from quire.attention.headwise import HeadwiseAttention
from quire.attention.reference import ReferenceAttention
from quire.attention.stripes import StripedAttention
from quire.ops import Kernels, Target
from support.thread_group import Meeting, ThreadGroup, on_every_rank

KERNELS = Kernels(Target(torch.device("cpu"), torch.float32))


class Divided:
    """The same step as that of a World, on cp * dcp ranks."""

    def __init__(
        self, kind: type[ContextAttention], inner: type[AttentionBackend], world: World, cp: int, dcp: int, block: int
    ) -> None:
        shape = world.backend.shape
        if reason := inner.unsupported(replace(shape, block_size=block)):
            pytest.skip(reason)
        self.world, self.cp, self.dcp, self.kind, self.inner = world, cp, dcp, kind, inner
        self.shape = replace(shape, num_heads=shape.num_heads // dcp, block_size=block)
        rows, columns = [Meeting(dcp) for _ in range(cp)], [Meeting(cp) for _ in range(dcp)]
        ranks = [divmod(rank, dcp) for rank in range(cp * dcp)]
        self.groups = [(ThreadGroup(c, cp, None, columns[d]), ThreadGroup(d, dcp, None, rows[c])) for c, d in ranks]
        self.backends = [kind(self.shape, *groups, inner, KERNELS) for groups in self.groups]
        assert {b.tokens_per_block for b in self.backends} == {shape.block_size}
        self.caches = [allocate(backend, len(world.cache)) for backend in self.backends]
        cached = [(0, cached) for cached, _ in world.requests]
        if any(count for _, count in cached):
            self.step(cached, None)

    def step(self, parts: list[tuple[int, int]], how: Scores | None) -> list[tuple[Any, ...]]:
        """Store some tokens of each request, and attend to them if `how` says so. Returns for each rank: which tokens
        it has computed, their results, and the keys that its queries saw."""
        world = self.world
        positions = np.concatenate([np.arange(start, start + count) for start, count in parts])
        of_step = [
            torch.cat([x[start : start + count] for x, (start, count) in zip(xs, parts, strict=True)])
            for xs in (world.k, world.v)
        ]
        layout = world.layout(parts)

        def rank(group: ThreadGroup) -> tuple[Any, ...]:
            backend, cache, (cp, dcp) = (x[group.rank] for x in (self.backends, self.caches, self.groups))
            owners = backend.owners(positions)
            shares = np.bincount(owners, minlength=cp.size).tolist()
            tokens = np.flatnonzero(owners == cp.rank)
            plan = backend.plan(replace(layout, shares=shares) if cp.size > 1 else layout)
            k, v = (x[tokens if len(tokens) else [0]] for x in of_step)  # at least one token goes through the layers
            backend.store(cache, k, None if self.shape.value_dim else v, plan)
            group._exchange(None)  # every rank has stored
            if how is None:
                return ()
            heads = slice(dcp.rank * self.shape.num_heads, (dcp.rank + 1) * self.shape.num_heads)
            q, scores = torch.cat(world.q)[tokens if len(tokens) else [0], heads], dict(how)
            if how.get("sinks") is not None:
                scores["sinks"] = how["sinks"][heads]
            return tokens, heads, *backend.attend(q, cache, plan, **scores)

        return on_every_rank(self.cp * self.dcp, rank)

    def check(self, window: int | None = None, soft_cap: float | None = None, sinks: Any = None) -> None:
        world, shape = self.world, self.shape
        how = {"scale": shape.head_dim**-0.5, "window": window, "soft_cap": soft_cap, "sinks": sinks}
        total, heads = sum(new for _, new in world.requests), shape.num_heads * self.dcp
        out = torch.full((total, heads, shape.out_dim), math.nan)
        lse = torch.full((total, heads), math.nan)
        for tokens, own, some_out, some_lse in self.step(world.requests, how):
            assert (some_out.dtype, some_lse.dtype) == (shape.dtype, torch.float32)
            assert some_out.shape == (max(1, len(tokens)), shape.num_heads, shape.out_dim)
            assert some_lse.shape == some_out.shape[:2]
            out[tokens, own], lse[tokens, own] = some_out[: len(tokens)].float(), some_lse[: len(tokens)]
        tolerance = 1e-5 if shape.dtype is torch.float32 else 1.5e-2
        start = 0
        for r, (_, new) in enumerate(world.requests):
            k, v = world.k[r], world.v[r]
            if shape.cell is not None:
                k, v = (from_bytes(to_bytes(x, shape.cell), shape.cell) for x in (k, v))
            wanted, wanted_lse = dense(world.q[r], k, v[..., : shape.out_dim], **how)
            torch.testing.assert_close(out[start : start + new], wanted, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(lse[start : start + new], wanted_lse, atol=1e-5, rtol=1e-5)
            start += new


def divided(
    kind: type[ContextAttention],
    cp: int,
    dcp: int,
    requests: list[tuple[int, int]],
    inner: type[AttentionBackend] = CpuAttention,
    kept: Kept = FLOAT32,
    heads: int = 4,
    kv_heads: int = 1,
    dim: int = 16,
    value_dim: int | None = None,
    block: int = 16,
    **world: Any,
) -> Divided:
    large = block * (cp * dcp if kind is StripedAttention else 1)
    shape = AttentionShape(heads * dcp, kv_heads, dim, large, kept.dtype, torch.device("cpu"), value_dim, kept.cell)
    return Divided(kind, inner, World(ReferenceAttention(shape), requests, **world), cp, dcp, block)


SIZES = [(1, 2), (1, 4), (2, 1), (3, 1), (8, 1), (2, 2), (3, 2), (2, 4)]  # of cp and dcp
# What a rank computes is tested elsewhere. So it hardly matters with what the ranks of these tests compute it.
inners = pytest.mark.parametrize(
    "inner", [CpuAttention, pytest.param(ReferenceAttention, marks=pytest.mark.slow)], ids=lambda b: b.name
)


@pytest.mark.sampled(8)
@inners
@pytest.mark.parametrize(("cp", "dcp"), SIZES)
@pytest.mark.parametrize("window", [None, 1, 5, 12, 24])
def test_stripes_together_see_the_whole_context(inner, cp, dcp, window):
    divided(StripedAttention, cp, dcp, MIXED, inner).check(window)


@pytest.mark.sampled(5)
@inners
@pytest.mark.parametrize(("cp", "dcp"), SIZES)
@pytest.mark.parametrize("requests", [[(40, 1)], [(0, 2)], [(5, 1), (17, 1)], [(0, 1), (33, 2)]], ids=str)
def test_some_ranks_compute_no_token_of_a_small_step(inner, cp, dcp, requests):
    divided(StripedAttention, cp, dcp, requests, inner).check()


@pytest.mark.sampled(3)
@inners
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("new", [1, 2, 3, 5, 9])
def test_every_request_computes_equally_many_tokens(inner, window, new):
    """One each, or one and some drafts, which are fewer than there are stripes or more."""
    requests = [(cached, new) for cached in (0, 1, 2, 15, 16, 40, 130)]
    for cp, dcp in [(1, 2), (3, 1), (2, 2)]:
        divided(StripedAttention, cp, dcp, requests, inner).check(window)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(12))
def test_any_chunks_of_any_requests(seed):
    draw = np.random.default_rng(seed)
    cp, dcp = SIZES[seed % len(SIZES)]
    requests = [(int(draw.integers(0, 300)), int(draw.integers(1, 90))) for _ in range(draw.integers(1, 12))]
    window = None if seed % 3 else int(draw.integers(1, 100))
    kept = [FLOAT32, BFLOAT16, *CELLS][seed % 6]
    divided(StripedAttention, cp, dcp, requests, kept=kept, block=int(16 * draw.integers(1, 4)), seed=seed).check(
        window
    )


kinds = pytest.mark.parametrize("kept", [FLOAT32, BFLOAT16, NARROW, *CELLS], ids=str)


@pytest.mark.sampled(6)
@inners
@kinds
@pytest.mark.parametrize(("cp", "dcp"), [(1, 3), (3, 1), (2, 2)])
def test_stripes_of_latents_with_everything_else(inner, kept, cp, dcp):
    sinks = torch.linspace(-3, 6, 4 * dcp)
    latents = divided(StripedAttention, cp, dcp, MIXED, inner, kept, dim=40, value_dim=32)
    latents.check()
    latents.check(17, soft_cap=2.0, sinks=sinks)


@pytest.mark.sampled(6)
@inners
@kinds
@pytest.mark.parametrize(("cp", "dcp"), [(1, 3), (3, 1), (2, 2)])
def test_stripes_of_keys_and_values_with_everything_else(inner, kept, cp, dcp):
    sinks = torch.tensor([-200.0, 0.0, 4.0, 300.0]).repeat(dcp)
    striped = divided(StripedAttention, cp, dcp, MIXED, inner, kept, kv_heads=1 if dcp > 1 else 2)
    striped.check()
    striped.check(10, soft_cap=3.0, sinks=sinks)


@pytest.mark.sampled(12)
@inners
@kinds
@pytest.mark.parametrize(("cp", "kv_heads"), [(2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("window", [None, 10])
def test_heads_together_see_the_whole_context(inner, kept, cp, kv_heads, window):
    by_heads = divided(HeadwiseAttention, cp, 1, MIXED, inner, kept, heads=8, kv_heads=kv_heads)
    by_heads.check(window)
    by_heads.check(window, soft_cap=3.0, sinks=torch.linspace(-3, 6, 8))
    divided(HeadwiseAttention, cp, 1, [(40, 1)], inner, kept, heads=8, kv_heads=kv_heads).check(window)


@pytest.mark.parametrize("kind", [StripedAttention, HeadwiseAttention])
def test_requests_share_blocks_and_one_stores_what_another_reads(kind):
    requests = [(96, 5), (96, 1), (120, 30)]
    divided(kind, 2, 1, requests, heads=4, kv_heads=2, shared=64).check()


def test_recorded_sizes_may_be_padded():
    """Tokens behind the last request, and requests without tokens, change nothing. Every rank asks nothing of the
    device: a plan has the same shapes for all steps of a size."""
    world = divided(StripedAttention, 1, 2, [(37, 1), (0, 1), (5, 1)])
    padded, layouts = world.world.layout, []
    for uniform in (1, 0):

        def layout(parts: list[tuple[int, int]], uniform: int = uniform) -> Any:
            plain = padded(parts)
            more = 3
            layouts.append(
                replace(
                    plain,
                    query_start_loc=torch.cat([plain.query_start_loc, plain.query_start_loc[-1:].expand(more)]),
                    seq_lens=torch.cat([plain.seq_lens, torch.zeros(more, dtype=torch.int32)]),
                    slot_mapping=torch.cat([plain.slot_mapping, torch.full((more,), -1)]),
                    block_table=torch.cat([plain.block_table, plain.block_table[:1].expand(more, -1)]),
                    tokens_per_request=uniform,
                )
            )
            return layouts[-1]

        world.world.layout = layout  # type: ignore[method-assign]
        results = []

        def rank(group: ThreadGroup, layout: Any = layout) -> Any:
            backend, cache = world.backends[group.rank], world.caches[group.rank]
            plan = backend.plan(layout(world.world.requests))
            q = torch.cat([*world.world.q, torch.full_like(world.world.q[0], math.nan).expand(3, -1, -1)])
            heads = slice(group.rank * 4, group.rank * 4 + 4)
            return backend.attend(q[:, heads], cache, plan, scale=0.25)[0][:3]

        world.step(world.world.requests, None)
        results = torch.cat(on_every_rank(2, rank), 1)
        expected = torch.cat(
            [
                dense(q, k, v, 0.25, None, None, None)[0]
                for q, k, v in zip(world.world.q, world.world.k, world.world.v, strict=True)
            ]
        )
        torch.testing.assert_close(results, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_packed_without_loss(dtype):
    out, lse = torch.randn(7, 3, 8).to(dtype), torch.randn(7, 3)
    lse[0] = -math.inf
    again = unpacked(packed(out, lse))
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)
