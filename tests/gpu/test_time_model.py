"""The time model against published kernels, and how its answers must change with the work."""

from dataclasses import replace

import pytest

from benchmarks.gpu.model import Work, estimate, queueing, resident_programs
from benchmarks.gpu.published import KERNELS
from benchmarks.gpu.rates import RATES

WORK = Work("work", 4000, 2, moved=2e5, cached=4e5, in_flight=32_768, products=1e8, synchronous=False,
            lanes={"fma": 1e5, "special": 4e5}, instructions=4e4, shared=1e5, streams=1)  # fmt: skip


def test_nine_of_ten_published_kernels_are_predicted_within_15_percent() -> None:
    good = [kernel for kernel in KERNELS if abs(kernel.error()) <= 0.15]
    assert len(good) >= 0.9 * len(KERNELS)


@pytest.mark.parametrize(("name", "card"), [
    ("FlashAttention-2, head 64", "H100"), ("FlashAttention-2, head 128", "H100"),
    ("FlashAttention-2, head 128", "A100"), ("FlashAttention-3, head 64", "H100"),
    ("FlashAttention-3, head 128", "H100"), ("FlashAttention-3, head 256", "H100"),
    ("Triton's fused attention, head 128", "H100"), ("cuBLAS", "H100"), ("FlashMLA", "H100"),
])  # fmt: skip
def test_a_published_kernel_of_each_family_is_predicted_within_15_percent(name: str, card: str) -> None:
    errors = [kernel.error() for kernel in KERNELS if kernel.name.startswith(name) and kernel.card == card]
    assert min(abs(error) for error in errors) <= 0.15
    assert abs(sum(errors) / len(errors)) <= 0.15


@pytest.mark.parametrize("card", list(RATES))
@pytest.mark.parametrize("field", ["moved", "cached", "products", "instructions", "shared", "programs"])
def test_more_work_never_takes_less_time(card: str, field: str) -> None:
    times = [estimate(replace(WORK, **{field: type(getattr(WORK, field))(getattr(WORK, field) * factor)}),
                      RATES[card]).seconds for factor in (1, 1.5, 2, 4, 16)]  # fmt: skip
    assert times == sorted(times)


def test_a_longer_longest_program_never_takes_less_time() -> None:
    times = [estimate(replace(WORK, longest=longest), RATES["H100"]).seconds for longest in (1.5, 2.0, 4.0)]
    assert times == sorted(times)


@pytest.mark.parametrize("card", list(RATES))
def test_more_bytes_in_flight_never_take_more_time(card: str) -> None:
    works = [replace(WORK, products=0.0, in_flight=size) for size in (1024.0, 8192.0, 65_536.0)]
    times = [estimate(work, RATES[card]).seconds for work in works]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_no_launch_beats_the_roofline_of_the_data_sheet() -> None:
    for kernel in KERNELS:
        assert 0 < kernel.predicted().share < 1


def test_an_empty_launch_takes_what_was_measured() -> None:
    assert estimate(Work("empty", 1), RATES["H100"]).seconds == pytest.approx(1.28e-6, rel=0.05)


def test_streams_overlap_stations_between_their_sum_and_their_maximum() -> None:
    demands = [3.0, 2.0, 1.0]
    times = [queueing(demands, streams) for streams in (1, 2, 4, 64)]
    assert times[0] == 6.0
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(3.0, rel=0.05)
    assert queueing(demands, 0) == 3.0


def test_registers_and_shared_memory_limit_the_programs_of_a_processor() -> None:
    assert resident_programs(RATES["A100"], 4, 255, 49_152) == 2
    assert resident_programs(RATES["H100"], 8, 255, 100_000) == 1
    assert resident_programs(RATES["H100"], 4, 32, 100_000) == 2
