"""Attention on the CPU: a token has the same result bit for bit, whatever else is in the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention.test_attention import allocate
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, StepLayout
from quire.attention.cpu import CpuAttention
from quire.ops.cpu import build
from support.threads import thread_count

CPU = torch.device("cpu")
BLOCK = 16
LENGTH = 1100  # several splits (see attention.h's split_end)
PLACES = (
    0,
    1,
    15,
    16,
    63,
    64,
    127,
    255,
    256,
    300,
    511,
    512,
    600,
    1023,
    1024,
    1099,
)  # of tokens that are computed alone


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    cell: torch.dtype | None = None
    value_dim: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    biased: int = 0  # the farthest distance with a bias of its own
    length: int = LENGTH

    def __str__(self) -> str:
        parts = [f"{self.heads}x{self.kv_heads}x{self.dim}", str(self.dtype)[6:]]
        parts += [str(self.cell)[6:]] if self.cell else []
        parts += [f"latent{self.value_dim}"] if self.value_dim else []
        parts += [f"window{self.window}"] if self.window else []
        parts += ["capped"] if self.soft_cap else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"biased{self.biased}"] if self.biased else []
        return "-".join(parts)


def layout_of(table: Tensor, parts: Sequence[tuple[int, int, int]]) -> StepLayout:
    """parts: of each request of the step: its row in the table, and the range of its tokens that are in the step"""
    starts = torch.tensor([0, *(stop - start for _, start, stop in parts)]).cumsum(0).int()
    ends = torch.tensor([stop for _, _, stop in parts], dtype=torch.int32)
    slots = []
    for r, start, stop in parts:
        places = torch.arange(start, stop)
        slots.append(table[r, places // BLOCK].long() * BLOCK + places % BLOCK)
    rows = table[[r for r, _, _ in parts]].contiguous()
    counts = {stop - start for _, start, stop in parts}
    tokens = counts.pop() if len(counts) == 1 else 0
    return StepLayout(starts, ends, torch.cat(slots), rows, tokens_per_request=tokens)


class Sequences:
    """Sequences whose keys and values are stored in scattered blocks; the first one is looked at."""

    def __init__(
        self,
        case: Case,
        lengths: Sequence[int],
        backend: type[AttentionBackend] = CpuAttention,
        device: torch.device = CPU,
    ) -> None:
        shape = AttentionShape(
            case.heads, case.kv_heads, case.dim, BLOCK, case.dtype, device, case.value_dim, case.cell, True
        )
        if reason := backend.unsupported(shape):
            pytest.skip(reason)
        self.case, self.backend = case, backend(shape)
        generator = torch.Generator().manual_seed(1)

        def draw(length: int, heads: int) -> Tensor:
            return (1.5 * torch.randn(length, heads, case.dim, generator=generator)).to(case.dtype)

        self.q = [draw(length, case.heads) for length in lengths]
        self.k = [draw(length, case.kv_heads) for length in lengths]
        self.v = [draw(length, case.kv_heads) for length in lengths]
        self.sinks = torch.randn(case.heads, generator=generator) if case.sinks else None
        self.bias = torch.randn(case.heads, 2 * case.biased + 1, generator=generator) if case.biased else None
        blocks = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(blocks), generator=generator).int()
        self.table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for r, mine in enumerate(order.split(blocks)):
            self.table[r, : len(mine)] = mine
        self.cache = allocate(self.backend, sum(blocks))
        everything = [(r, 0, length) for r, length in enumerate(lengths)]
        k, v = (torch.cat(x) for x in (self.k, self.v))
        self.backend.store(self.cache, k, None if case.value_dim else v, self.backend.plan(self.layout(everything)))

    def layout(self, parts: Sequence[tuple[int, int, int]]) -> StepLayout:
        return layout_of(self.table, parts)

    def attend(self, *parts: tuple[int, int, int]) -> list[tuple[Tensor, Tensor]]:
        """Result and logarithm of the sum, of each request of the step."""
        case = self.case
        q = torch.cat([self.q[r][start:stop] for r, start, stop in parts])
        out, lse = self.backend.attend(
            q,
            self.cache,
            self.backend.plan(self.layout(parts)),
            scale=case.dim**-0.5,
            window=case.window,
            soft_cap=case.soft_cap,
            sinks=self.sinks,
            bias=self.bias,
        )
        sizes = [stop - start for _, start, stop in parts]
        return list(zip(out.split(sizes), lse.split(sizes), strict=True))


def assert_same_bits(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], what: Any) -> None:
    for x, y in zip(got, wanted, strict=True):
        words = torch.int16 if x.element_size() == 2 else torch.int32
        different = (x.contiguous().view(words) != y.contiguous().view(words)).sum().item()
        assert different == 0, f"{what}: {different} of {x.numel()} numbers differ"


def check(case: Case) -> None:
    others = [1, 70, 333, 530, case.length, 90, 17]
    sequences, end = Sequences(case, [case.length, *others]), case.length
    with thread_count(1):
        [(out, lse)] = sequences.attend((0, 0, end))
    assert torch.isfinite(out.float()).all()

    def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return out[start:stop], lse[start:stop]

    decoding = [(r, length - 1, length) for r, length in enumerate([case.length, *others])][1:]
    for threads in range(1, 5):
        with thread_count(threads):
            for size in (512, 100, 48, 7) if threads in (1, 4) else (300,):
                for start in range(0, end, size):
                    stop = min(start + size, end)
                    if size < 100 and start not in (0, 252, 1022):
                        continue
                    [got] = sequences.attend((0, start, stop))
                    assert_same_bits(got, part(start, stop), (threads, "alone", start, stop))
            for place in (p for p in PLACES if p < end):
                [got] = sequences.attend((0, place, place + 1))
                assert_same_bits(got, part(place, place + 1), (threads, "alone", place))
                crowd = [*decoding[: place % 8], (0, place, place + 1), *decoding[place % 8 :], (4, 0, 77)]
                got = sequences.attend(*crowd)[place % 8]
                assert_same_bits(got, part(place, place + 1), (threads, "with others", place))
            got = sequences.attend(*decoding, (0, 190, 1090))[-1]
            assert_same_bits(got, part(190, 1090), (threads, "a chunk with others"))


INT8, FP8 = torch.int8, torch.float8_e4m3fn
CASES = [
    Case(),
    Case(dtype=torch.float32),
    Case(dtype=torch.float16),
    Case(heads=8, kv_heads=8, dim=80),
    Case(heads=6, kv_heads=2, dim=96, dtype=torch.float32),
    Case(heads=7, kv_heads=1, dim=128),
    Case(heads=2, kv_heads=1, dim=256),
    Case(heads=4, kv_heads=1, dim=40),
    Case(window=100),
    Case(window=257, dtype=torch.float32),
    Case(heads=8, kv_heads=2, window=33, sinks=True),
    Case(soft_cap=5.0, window=64),
    Case(soft_cap=5.0, dtype=torch.float32),
    Case(sinks=True),
    Case(biased=128, heads=2, kv_heads=2),
    Case(biased=30, dtype=torch.float32, dim=24, window=333),
    Case(cell=torch.float16, dtype=torch.float32),
    Case(cell=torch.float16, dtype=torch.float32, heads=6, dim=80, window=70, sinks=True),
    Case(cell=INT8),
    Case(cell=INT8, dtype=torch.float16, heads=6, window=70),
    Case(cell=FP8, heads=6, kv_heads=2, dim=96),
    Case(cell=FP8, dtype=torch.float32, window=70, sinks=True),
    Case(cell=INT8, heads=12, kv_heads=1, dim=80, window=333, soft_cap=5.0),
    Case(heads=5, kv_heads=1, dim=144, value_dim=128),
    Case(heads=16, kv_heads=1, dim=80, value_dim=64, dtype=torch.float32),
    Case(heads=4, kv_heads=1, dim=80, value_dim=64, cell=INT8),
    Case(heads=3, kv_heads=1, dim=80, value_dim=64, cell=FP8, window=130),
    Case(heads=4, kv_heads=1, dim=80, value_dim=64, dtype=torch.float16),
]


OFTEN = [case for case in CASES if case.cell and (case.window or case.value_dim)][::2]


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[pytest.mark.sampled(5)] * (case not in OFTEN)) for case in CASES]
)
def test_a_tokens_result_does_not_depend_on_the_step_or_the_threads(case: Case) -> None:
    check(case)


@pytest.mark.nightly
@pytest.mark.slow  # the kernels are compiled once more
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        pytest.param(Case(cell=INT8, window=100), marks=pytest.mark.nightly),
        pytest.param(Case(dtype=torch.float32), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_that_holds_for_the_kernels_of_an_older_processor_too(case: Case) -> None:
    try:
        build.choose_instruction_set("avx2")
    except ValueError as error:
        pytest.skip(str(error))
    try:
        check(case)
    finally:
        build.choose_instruction_set("native")


def test_that_holds_at_long_contexts_where_splits_are_longer() -> None:
    case = Case(heads=2, kv_heads=1, dim=32, length=17_500)
    sequences = Sequences(case, [case.length, 40, 9000])
    places = (8191, 8192, 8703, 16_383, 16_384, 17_407, 17_408, 17_499)
    with thread_count(1):
        wanted = {place: sequences.attend((0, place, place + 1))[0] for place in places}
    for threads in range(1, 5):
        with thread_count(threads):
            for place in places:
                got = sequences.attend((1, 39, 40), (0, place, place + 1), (2, 8990, 9000))[1]
                assert_same_bits(got, wanted[place], (threads, place))
                [(out, lse)] = sequences.attend((0, place - 99, place + 1))
                assert_same_bits((out[-1:], lse[-1:]), wanted[place], (threads, "a chunk", place))
