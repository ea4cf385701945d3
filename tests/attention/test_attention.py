"""Every backend against attention that knows nothing of pages: torch's own with a mask, a request at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, StepLayout
from quire.attention.cells import from_bytes, to_bytes
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention

BACKENDS = [ReferenceAttention, CpuAttention]
BORDERS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200)


class Kept(NamedTuple):
    """The model's type, and the cells of its cache if it has such."""

    dtype: torch.dtype
    cell: torch.dtype | None = None

    def __str__(self) -> str:
        return " ".join(str(t)[6:] for t in self if t is not None)


FLOAT32, BFLOAT16 = Kept(torch.float32), Kept(torch.bfloat16)
NARROW = Kept(torch.float32, torch.float16)
CELLS = [Kept(d, c) for d in (torch.float32, torch.bfloat16) for c in (torch.int8, torch.float8_e4m3fn)]
OF_FLOAT16 = [
    pytest.param(Kept(torch.float16, cell), marks=pytest.mark.sampled(4))
    for cell in (None, torch.int8, torch.float8_e4m3fn)
]


def build(
    backend: type[AttentionBackend],
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    kept: Kept,
    value_dim: int | None = None,
) -> AttentionBackend:
    shape = AttentionShape(heads, kv_heads, dim, block, kept.dtype, torch.device("cpu"), value_dim, kept.cell)
    if reason := backend.unsupported(shape):
        pytest.skip(reason)
    return backend(shape)


def allocate(backend: AttentionBackend, num_blocks: int) -> Tensor:
    """The cache of the second of three layers; all bytes are 255: NaN in every type, except that it is -1 in int8."""
    return backend.view(torch.full((num_blocks, 3 * backend.entry_bytes()), 255, dtype=torch.uint8), 1)


def blocks_of(backend: AttentionBackend, cache: Tensor) -> Tensor:
    """All bytes of the blocks in which `allocate` placed a cache: [blocks, 3, entry_bytes]"""
    memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    return memory.view(len(cache), 3, backend.entry_bytes())


@dataclass
class World:
    """Requests of (cached tokens, new tokens) with their keys in scattered blocks of a cache full of NaN."""

    backend: AttentionBackend
    requests: list[tuple[int, int]]
    seed: int = 0
    shared: int = 0  # the first so many cached tokens, whole blocks, are the same blocks for all requests
    cache: Tensor = field(init=False)

    def __post_init__(self) -> None:
        s, g = self.backend.shape, torch.Generator().manual_seed(self.seed)
        draw = lambda *size: torch.randn(*size, generator=g).to(s.dtype)  # noqa: E731
        lengths = [cached + new for cached, new in self.requests]
        self.k = [draw(length, s.num_kv_heads, s.head_dim) for length in lengths]
        self.v = self.k
        if s.value_dim is None:
            self.v = [draw(length, s.num_kv_heads, s.head_dim) for length in lengths]
        for r in range(1, len(lengths)):
            self.k[r][: self.shared], self.v[r][: self.shared] = self.k[0][: self.shared], self.v[0][: self.shared]
        self.q = [draw(new, s.num_heads, s.head_dim) for _, new in self.requests]

        needed = [-(-length // s.block_size) for length in lengths]
        total = sum(needed) + 3
        order = torch.randperm(total, generator=g).tolist()
        self.table = torch.randint(0, total, (len(lengths), max(needed) + 2), generator=g, dtype=torch.int32)
        for r, blocks in enumerate(needed):
            for b in range(blocks):
                common = r > 0 and b < self.shared // s.block_size
                self.table[r, b] = self.table[0, b] if common else order.pop()
        self.cache = allocate(self.backend, total)
        self.store([(0, cached) for cached, _ in self.requests])  # what earlier steps have stored,
        self.store(self.requests)  # then this step

    def store(self, parts: list[tuple[int, int]]) -> None:
        k = torch.cat([k[start : start + count] for k, (start, count) in zip(self.k, parts, strict=True)])
        v = torch.cat([v[start : start + count] for v, (start, count) in zip(self.v, parts, strict=True)])
        latent = self.backend.shape.value_dim is not None
        self.backend.store(self.cache, k, None if latent else v, self.backend.plan(self.layout(parts)))

    def layout(self, requests: list[tuple[int, int]]) -> StepLayout:
        size = self.backend.shape.block_size
        positions = [torch.arange(c, c + n) for c, n in requests]
        slots = [self.table[r, p // size].long() * size + p % size for r, p in enumerate(positions)]
        starts = torch.tensor([0, *(n for _, n in requests)]).cumsum(0).int()
        lengths = torch.tensor([c + n for c, n in requests], dtype=torch.int32)
        counts = {n for _, n in requests}
        uniform = counts.pop() if len(counts) == 1 else 0
        return StepLayout(starts, lengths, torch.cat(slots), self.table, tokens_per_request=uniform)

    def check(
        self,
        window: int | None = None,
        scale: float | None = None,
        tolerance: float | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        s = self.backend.shape
        scale = scale or s.head_dim**-0.5
        plan, q = self.backend.plan(self.layout(self.requests)), torch.cat(self.q)
        how: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "bias": bias}
        out, lse = self.backend.attend(q, self.cache, plan, **how)
        tolerance = tolerance or {torch.float32: 1e-5, torch.float16: 2e-3}.get(s.dtype, 1e-2)
        at = 0
        for r, (_, new) in enumerate(self.requests):
            k, v = (x if s.cell is None else from_bytes(to_bytes(x, s.cell), s.cell) for x in (self.k[r], self.v[r]))
            wanted, wanted_lse = dense(self.q[r], k, v[..., : s.out_dim], **how)
            torch.testing.assert_close(out[at : at + new].float(), wanted, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(lse[at : at + new], wanted_lse, atol=1e-5, rtol=1e-5)
            at += new
        assert (out.dtype, lse.dtype, out.is_contiguous()) == (s.dtype, torch.float32, True)
        assert blocks_of(self.backend, self.cache)[:, ::2].eq(255).all(), "other layers' entries are untouched"


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over one request's tokens in float64. Without caps, sinks and biases it is torch's own."""
    length, new, group = len(k), len(q), q.shape[1] // k.shape[1]
    position, key = torch.arange(length - new, length)[:, None], torch.arange(length)[None, :]
    mask = (key <= position) & (key > position - (window or length + 1))
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) * scale  # [heads, queries, keys]
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if bias is not None:
        far = bias.shape[1] // 2
        scores = scores + bias.double()[:, far + (key - position).clamp(-far, far)]
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:  # one key more, whose value is 0
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, new, 1)], dim=-1)
        v = torch.cat([v, v.new_zeros(len(v), 1, v.shape[2])], dim=1)
    if soft_cap is None and sinks is None and bias is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        out = scores.softmax(-1) @ v
    return out.transpose(0, 1).float(), scores.logsumexp(-1).transpose(0, 1).float()


MIXED = [(0, 1), (16, 1), (0, 40), (200, 1), (37, 20), (130, 70), (15, 2), (64, 1)]

pytestmark = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
kinds = pytest.mark.parametrize("kept", [FLOAT32, BFLOAT16, NARROW, CELLS[1], CELLS[2], *OF_FLOAT16], ids=str)


@pytest.mark.sampled(22)
@pytest.mark.parametrize("kept", [FLOAT32, BFLOAT16, NARROW, *CELLS, *OF_FLOAT16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 2), (14, 2), (8, 1), (71, 1)])
@pytest.mark.parametrize("window", [None, 16])
def test_every_grouping_of_heads(backend, kept, heads, kv_heads, window):
    World(build(backend, heads, kv_heads, 64, 16, kept), MIXED).check(window)


@pytest.mark.sampled(10)
@kinds
@pytest.mark.parametrize("dim", [8, 24, 33, 40, 64, 80, 96, 112, 128, 256])
def test_every_head_size(backend, kept, dim):
    World(build(backend, 4, 2, dim, 16, kept), MIXED).check()


@pytest.mark.sampled(10)
@kinds
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("block", [16, 32, 48])
def test_windows_and_block_sizes(backend, kept, window, block):
    World(build(backend, 4, 2, 32, block, kept), MIXED).check(window)


@pytest.mark.sampled(7)
@kinds
@pytest.mark.parametrize("window", [None, 5, 64])
def test_lengths_around_the_borders_of_blocks_and_tiles(backend, kept, window):
    attention = build(backend, 2, 1, 16, 16, kept)
    World(attention, [(n - 1, 1) for n in BORDERS]).check(window)
    World(attention, [(0, n) for n in BORDERS]).check(window)
    World(attention, [(n, 19) for n in BORDERS]).check(window)


@pytest.mark.sampled(8)
@kinds
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_scores_are_capped(backend, kept, window, soft_cap):
    """With scores from near 0 to far beyond the cap."""
    World(build(backend, 8, 2, 64, 16, kept), MIXED).check(window, soft_cap=soft_cap)
    World(build(backend, 8, 2, 64, 32, kept), MIXED).check(window, soft_cap=soft_cap, scale=20.0, tolerance=2e-2)


@pytest.mark.sampled(6)
@kinds
@pytest.mark.parametrize("window", [None, 1, 16])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_sinks_take_part_in_the_softmax(backend, kept, window, soft_cap):
    """From those that count nothing to those that leave nothing for the keys."""
    sinks = torch.tensor([-200.0, -3.0, 0.0, 1.5, 4.0, 9.0, 90.0, 300.0])
    World(build(backend, 8, 2, 64, 16, kept), MIXED).check(window, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.sampled(4)
@kinds
@pytest.mark.parametrize(("dim", "window", "soft_cap"), [(24, None, None), (33, 16, 3.0), (64, None, 3.0)])
def test_scores_get_the_bias_of_their_distance(backend, kept, dim, window, soft_cap):
    """Tables from one bias for all keys behind, to one bias for each distance."""
    world, sinks = World(build(backend, 4, 2, dim, 16, kept), MIXED), torch.tensor([-3.0, 0.0, 1.5, 4.0])
    for far in (1, 40, 128):
        bias = 2 * torch.randn(4, 2 * far + 1, generator=torch.Generator().manual_seed(far))
        world.check(window, soft_cap=soft_cap, sinks=sinks if far == 40 else None, bias=bias)


@pytest.mark.sampled(28)
@kinds
@pytest.mark.parametrize(("dim", "value_dim"), [(40, 32), (576, 512), (24, 24), (33, 17), (80, 1), (192, 128)])
@pytest.mark.parametrize("heads", [1, 5, 16])
def test_every_size_of_latents(backend, kept, heads, dim, value_dim):
    World(build(backend, heads, 1, dim, 16, kept, value_dim), MIXED).check()


@pytest.mark.sampled(42)
@kinds
@pytest.mark.parametrize("heads", [16, 64, 65, 128])
@pytest.mark.parametrize("block", [16, 32, 48])
def test_many_heads_share_a_latent(backend, kept, heads, block):
    World(build(backend, heads, 1, 40, block, kept, 32), MIXED).check()


@pytest.mark.sampled(14)
@kinds
@pytest.mark.parametrize("window", [None, 5, 64])
def test_latents_with_everything_else(backend, kept, window):
    attention = build(backend, 4, 1, 40, 16, kept, 32)
    for requests in ([(n - 1, 1) for n in BORDERS], [(0, n) for n in BORDERS], [(n, 19) for n in BORDERS]):
        World(attention, requests).check(window, soft_cap=2.0, sinks=torch.tensor([-1.0, 0.0, 1.0, 5.0]))
        World(attention, requests).check(window)


@kinds
def test_a_latent_is_stored_once(backend, kept):
    def token_bytes(dim: int) -> int:
        if kept.cell in (None, torch.float16):
            return dim * (kept.cell or kept.dtype).itemsize
        return dim + 4  # the scale

    attention = build(backend, 4, 1, 576, 16, kept, 512)
    assert attention.entry_bytes() == 16 * token_bytes(576) == allocate(attention, 3)[0].nbytes
    ordinary = build(backend, 4, 2, 64, 16, kept)
    assert ordinary.entry_bytes() == 2 * 16 * 2 * token_bytes(64) == allocate(ordinary, 3)[0].nbytes


@kinds
def test_entries_are_aligned_to_cache_lines(backend, kept):
    attention = build(backend, 4, 1, 33, 16, kept, 17)
    memory = torch.empty(5, 3 * attention.entry_bytes(), dtype=torch.uint8)
    caches = [attention.view(memory, j) for j in range(3)]
    assert {(block.data_ptr() - memory.data_ptr()) % 64 for cache in caches for block in cache} == {0}
    assert caches[0][0].nbytes <= attention.entry_bytes() < caches[0][0].nbytes + 64


@pytest.mark.sampled(4)
@kinds
@pytest.mark.parametrize("value_dim", [None, 24])
def test_a_block_is_moved_by_moving_its_bytes(backend, kept, value_dim):
    world = World(build(backend, 4, 1, 40, 16, kept, value_dim), [(37, 11)])
    q, how = world.q[0], {"scale": 0.2}
    out, lse = world.backend.attend(q, world.cache, world.backend.plan(world.layout(world.requests)), **how)
    blocks = blocks_of(world.backend, world.cache)
    blocks[:] = blocks.flip(0).clone()
    world.table = len(blocks) - 1 - world.table
    moved = world.backend.attend(q, world.cache, world.backend.plan(world.layout(world.requests)), **how)
    assert torch.equal(moved[0], out)
    assert torch.equal(moved[1], lse)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.sampled(28)
@kinds
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 3], indirect=True)  # several threads split the keys
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("value_dim", [None, 24])
def test_long_contexts_of_a_single_stream(backend, kept, window, value_dim):
    attention = build(backend, 4, 1, 32, 16, kept, value_dim)
    for requests in ([(2999, 1)], [(1500, 33), (10, 1)]):
        World(attention, requests).check(window)
        World(attention, requests).check(window, soft_cap=5.0, sinks=torch.tensor([-9.0, 0.0, 7.0, 20.0]))
        World(attention, requests).check(window, bias=torch.linspace(-3, 4, 4 * 257).view(4, 257))


def test_requests_share_blocks_and_one_stores_what_another_reads(backend):
    World(build(backend, 4, 2, 32, 16, FLOAT32), [(48, 5), (48, 1), (60, 30)], shared=32).check()


def test_large_scores_do_not_overflow(backend):
    World(build(backend, 4, 2, 64, 16, FLOAT32), MIXED).check(scale=20.0, tolerance=1e-3)


def test_a_step_without_tokens(backend):
    attention = build(backend, 4, 2, 32, 16, FLOAT32)
    empty = torch.zeros(0, dtype=torch.int32)
    plan = attention.plan(StepLayout(torch.zeros(1, dtype=torch.int32), empty, empty.long(), empty.view(0, 4)))
    cache = allocate(attention, 2)
    attention.store(cache, torch.zeros(0, 2, 32), torch.zeros(0, 2, 32), plan)
    out, lse = attention.attend(torch.zeros(0, 4, 32), cache, plan, scale=1.0)
    assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))


def test_slices_of_a_fused_projection_are_taken_as_they_are(backend):
    world = World(build(backend, 4, 2, 32, 16, BFLOAT16), MIXED)
    q, k, v = (torch.cat(x) for x in (world.q, world.k, world.v))
    plan = world.backend.plan(world.layout(world.requests))
    expected, _ = world.backend.attend(q, world.cache, plan, scale=0.2)
    new_k = torch.cat([k[c:] for k, (c, _) in zip(world.k, world.requests, strict=True)])
    new_v = torch.cat([v[c:] for v, (c, _) in zip(world.v, world.requests, strict=True)])
    fused = torch.cat([x.flatten(1) for x in (q, new_k, new_v)], dim=1)
    q, k, v = (x.unflatten(1, (-1, 32)) for x in fused.split([4 * 32, 2 * 32, 2 * 32], dim=1))
    assert not q.is_contiguous()
    world.backend.store(world.cache, k, v, plan)
    out, _ = world.backend.attend(q, world.cache, plan, scale=0.2)
    torch.testing.assert_close(out, expected)


def test_partial_results_over_disjoint_keys_merge_by_their_lse(backend):
    world = World(build(backend, 4, 2, 32, 16, FLOAT32), [(99, 1)])

    def attend(cached: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        plan = world.backend.plan(world.layout([(cached, 1)]))
        return world.backend.attend(world.q[0], world.cache, plan, scale=0.2, window=window)

    whole, whole_lse = attend(99)
    first, last = attend(63), attend(99, window=36)  # the first 64 keys, the other 36
    out, lse = torch.stack([first[0], last[0]]), torch.stack([first[1], last[1]])
    torch.testing.assert_close((out * lse.softmax(0)[..., None]).sum(0), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.logsumexp(0), whole_lse, atol=1e-5, rtol=1e-5)
