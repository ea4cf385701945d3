"""Attention in chunks of the text: a part of a request in one chunk sees what a text of that chunk would."""

from __future__ import annotations

import pytest
import torch
from attention.test_attention import FLOAT32, World, build, dense

from quire.attention.chunked import chunk_layout, in_chunks
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention

CHUNK = 48
MIXED = [(0, 1), (48, 1), (47, 2), (0, 40), (200, 1), (37, 200), (96, 48), (95, 49), (130, 70), (0, 0), (15, 2)]
ONE_EACH = [(length, 1) for length in (0, 1, 46, 47, 48, 49, 95, 96, 250)]


def in_parts(cached: int, new: int) -> list[tuple[int, int, int]]:
    """(begin of the chunk, first position, end) of the parts of a request's new tokens."""
    borders = range(cached // CHUNK * CHUNK, cached + new, CHUNK)
    return [(begin, max(begin, cached), min(begin + CHUNK, cached + new)) for begin in borders]


@pytest.mark.parametrize("requests", [MIXED, ONE_EACH, [(0, 300)], [(0, 20), (0, 48)]], ids=str)
@pytest.mark.parametrize("backend", [CpuAttention, ReferenceAttention], ids=lambda backend: backend.name)
def test_queries_see_their_chunk(backend, requests):
    inner = build(backend, 4, 2, 32, 16, FLOAT32)
    world, chunked = World(inner, requests), in_chunks(inner, CHUNK)
    plan = chunked.plan(world.layout(requests))
    out, lse = chunked.attend(torch.cat(world.q), world.cache, plan, scale=0.3)
    at = 0
    for q, k, v, (cached, new) in zip(world.q, world.k, world.v, requests, strict=True):
        for begin, first, end in in_parts(cached, new):
            how = {"scale": 0.3, "window": None, "soft_cap": None, "sinks": None}
            wanted, wanted_lse = dense(q[first - cached : end - cached], k[begin:end], v[begin:end], **how)
            rows = slice(at + first - cached, at + end - cached)
            torch.testing.assert_close(out[rows], wanted, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[rows], wanted_lse, atol=1e-5, rtol=1e-5)
        at += new


def test_steps_of_equal_sizes_have_layouts_of_equal_sizes():
    """So that recorded steps can be replayed."""
    inner = build(ReferenceAttention, 4, 2, 32, 16, FLOAT32)
    shapes = set()
    for requests in ([(0, 60), (90, 20)], [(40, 70), (200, 10)], [(95, 2), (0, 78)]):
        layout = chunk_layout(World(inner, requests).layout(requests), CHUNK, 16)
        shapes.add((layout.query_start_loc.shape, layout.seq_lens.shape, layout.block_table.shape[0]))
        assert layout.query_start_loc[-1] == 80
        assert (layout.query_start_loc.diff() >= 0).all()
    assert len(shapes) == 1


def test_a_chunk_is_made_of_whole_blocks():
    with pytest.raises(ValueError, match="block_size=16 does not divide the 40 tokens of an attention chunk"):
        in_chunks(build(ReferenceAttention, 4, 2, 32, 16, FLOAT32), 40)
