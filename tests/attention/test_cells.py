"""Caches of one byte an element: what they hold, bit by bit, and that this is what attention sees."""

from __future__ import annotations

import pytest
import torch
from attention.test_attention import BACKENDS, CELLS, NARROW, OF_FLOAT16, World, allocate, build
from torch import Tensor

from quire.attention.base import AttentionBackend, StepLayout
from quire.attention.cells import LARGEST, SCALE_BYTES, from_bytes, quantize, to_bytes
from quire.attention.cpu import CpuAttention

backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
kinds = pytest.mark.parametrize("kept", [*CELLS, *OF_FLOAT16[1:]], ids=str)


def numbers_of(cell: torch.dtype) -> Tensor:
    """All that a cell can hold, but for NaN and the -128 of int8, which would not be symmetric."""
    numbers = torch.arange(256).to(torch.uint8).view(cell).float()
    return numbers[numbers.abs() <= LARGEST[cell]]


def one_request(backend: AttentionBackend, tokens: int) -> StepLayout:
    blocks = -(-tokens // backend.shape.block_size)
    return StepLayout(
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
        torch.arange(tokens),
        torch.arange(blocks, dtype=torch.int32)[None],
    )


def stored(backend: AttentionBackend, cache: Tensor, tokens: int) -> Tensor:
    """The first tokens of a cache: [2, tokens, kv_heads, head_dim + SCALE_BYTES]"""
    s = backend.shape
    if backend.name == "reference":
        return cache.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :tokens]
    dim = -(-s.head_dim // 16) * 16
    planes = cache.transpose(0, 2).transpose(1, 2)  # [2, blocks, kv_heads, bytes]
    cells, scales = planes[..., : s.block_size * dim], planes[..., s.block_size * dim :].unflatten(-1, (-1, 4))
    k = cells[0].unflatten(-1, (dim // 4, s.block_size, 4)).transpose(-3, -2).flatten(-2)
    v = cells[1].unflatten(-1, (s.block_size // 4, dim, 4)).transpose(-2, -1).flatten(-3, -2)
    rows = torch.cat([torch.stack([k, v])[..., : s.head_dim], scales], dim=-1)  # [2, blocks, kv_heads, block_size, ...]
    return rows.transpose(2, 3).flatten(1, 2)[:, :tokens]


@kinds
def test_a_cell_is_as_near_as_its_type_allows(kept):
    x = (torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)) * 7).to(kept.dtype)
    cells, scale = quantize(x, kept.cell)
    assert cells.float().abs().amax(-1).eq(LARGEST[kept.cell]).all()
    error = (cells.float() * scale[:, None] - x.float()).abs()
    bound = scale[:, None] / 2
    if kept.cell is not torch.int8:  # 4 significant bits, or below the normal numbers multiples of 2**-9
        bound = torch.maximum(x.float().abs() * 2**-4, scale[:, None] * 2**-10)
    assert (error <= bound * (1 + 2e-5)).all()
    again = to_bytes(from_bytes(to_bytes(x, kept.cell), kept.cell), kept.cell)
    torch.testing.assert_close(from_bytes(again, kept.cell), cells.float() * scale[:, None], rtol=1e-6, atol=0)


@backends
@kinds
@pytest.mark.parametrize("head_dim", [8, 33, 64])
def test_what_is_stored_is_what_the_definition_says(backend, kept, head_dim):
    """Also of zeros, of the smallest and the largest numbers, and of those halfway between two that a cell can hold."""
    attention = build(backend, 2, 2, head_dim, 16, kept)
    g = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-45, 4 if kept.dtype is torch.float16 else 38, 45)[:, None, None]
    k, v = (torch.randn(2, 45, 2, head_dim, generator=g) * sizes).to(kept.dtype)
    numbers = numbers_of(kept.cell)
    halfway = (numbers[1:] + numbers[:-1])[torch.randint(len(numbers) - 1, (8, 2, head_dim), generator=g)] / 2
    k[:8], k[:8, :, 0], k[8] = halfway.to(kept.dtype), LARGEST[kept.cell], 0
    cache = allocate(attention, 3)
    attention.store(cache, k, v, attention.plan(one_request(attention, 45)))
    assert torch.equal(stored(attention, cache, 45)[0], to_bytes(k, kept.cell))
    assert torch.equal(stored(attention, cache, 45)[1], to_bytes(v, kept.cell))


@backends
@kinds
@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 15, 32])
def test_numbers_that_are_not_finite_do_not_get_lost(backend, kept, number, place):
    attention = build(backend, 2, 2, 33, 16, kept)
    k = torch.ones(2, 2, 33, dtype=kept.dtype)
    k[1, 0, place] = number
    cache = allocate(attention, 1)
    attention.store(cache, k, k, attention.plan(one_request(attention, 2)))
    for seen in from_bytes(stored(attention, cache, 2), kept.cell):
        assert seen.isfinite().all(-1).tolist() == [[True, True], [False, True]]


@backends
@kinds
@pytest.mark.sampled(3)
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 256])
def test_numbers_that_cells_can_hold_are_seen_exactly(backend, kept, heads):
    """The only key's dot product with a unit vector is one of its elements, and the result is its value."""
    numbers = numbers_of(kept.cell)
    attention = build(backend, heads, 1, len(numbers), 16, kept)
    k, v = numbers.to(kept.dtype)[None, None], numbers.flip(0).to(kept.dtype)[None, None]
    plan, cache = attention.plan(one_request(attention, 1)), allocate(attention, 1)
    attention.store(cache, k, v, plan)
    for some in torch.arange(len(numbers)).split(heads):
        q = torch.zeros(1, heads, len(numbers), dtype=kept.dtype)
        q[0, torch.arange(len(some)), some] = 1
        out, lse = attention.attend(q, cache, plan, scale=1.0)
        assert torch.equal(out, v.expand_as(out))
        torch.testing.assert_close(lse[0, : len(some)], numbers[some], rtol=1e-6, atol=2e-7)


@backends
@kinds
def test_equal_tokens_are_equal_bytes_whatever_the_step(backend, kept):
    world = World(build(backend, 4, 2, 40, 16, kept), [(0, 100), (0, 3), (0, 50)])
    at_once = world.cache.clone()
    world.cache.fill_(255)
    for cut in (7, 3, 1, 16):
        for start in range(0, 100, cut):
            world.store([(min(start, len(k)), max(0, min(cut, len(k) - start))) for k in world.k])
        assert torch.equal(world.cache, at_once)


@kinds
def test_both_backends_see_the_same(kept):
    requests = [(0, 40), (200, 1), (37, 20), (15, 2)]
    results = []
    for backend in BACKENDS:
        world = World(build(backend, 8, 2, 64, 16, kept), requests)
        plan = world.backend.plan(world.layout(requests))
        results.append(world.backend.attend(torch.cat(world.q), world.cache, plan, scale=0.2, window=30))
    (out, lse), (other, other_lse) = results
    torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if kept.dtype is torch.float32 else 2**-7
    torch.testing.assert_close(out, other, rtol=tolerance, atol=tolerance)


@backends
@pytest.mark.parametrize("tokens", [1, 32, 45])
@pytest.mark.parametrize("head_dim", [8, 33, 64])
def test_a_float32_model_stores_float16_and_only_infinities_become_infinite(backend, tokens, head_dim):
    attention = build(backend, 2, 2, head_dim, 16, NARROW)
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, tokens, 2, head_dim, generator=g) * torch.logspace(-9, 6, tokens)[:, None, None]
    k[0, 0, :4] = torch.tensor([65519.9, 65536, -1e30, float("inf")])
    cache = allocate(attention, 3)
    attention.store(cache, k, v, attention.plan(one_request(attention, tokens)))
    for plane, x in enumerate((k, v)):
        held = attention.read(cache, torch.arange(3), plane)[:tokens].float()
        wanted = x.half().float()
        wanted = torch.where(wanted.isinf() & x.isfinite(), x.sign() * 65504, wanted)
        assert torch.equal(held, wanted)
    assert k[0, 0, 3] == attention.read(cache, torch.arange(3), 0)[0, 0, 3].float()


def test_half_the_bytes_of_bfloat16():
    whole, cells = (build(CpuAttention, 16, 8, 128, 16, kept) for kept in (CELLS[2]._replace(cell=None), CELLS[2]))
    assert cells.entry_bytes() / whole.entry_bytes() == (128 + SCALE_BYTES) / 256
