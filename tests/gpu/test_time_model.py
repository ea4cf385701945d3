"""The time model against published kernels, and how its answers must change with the work."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.gpu import expect
from benchmarks.gpu.launches import lanes, library_product
from benchmarks.gpu.model import Work, estimate, queueing, resident_programs
from benchmarks.gpu.published import KERNELS
from benchmarks.gpu.rates import RATES
from support.stand_in import run_on_stand_in

WORK = Work(
    "work",
    4000,
    2,
    moved=2e5,
    cached=4e5,
    in_flight=32_768,
    products=1e8,
    synchronous=False,
    lanes={"fma": 1e5, "special": 4e5},
    instructions=4e4,
    shared=1e5,
    streams=1,
)


def test_nine_of_ten_published_kernels_are_predicted_within_15_percent() -> None:
    good = [kernel for kernel in KERNELS if abs(kernel.error()) <= 0.15]
    assert len(good) >= 0.9 * len(KERNELS)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("FlashAttention-2, head 64", "H100"),
        ("FlashAttention-2, head 128", "H100"),
        ("FlashAttention-2, head 128", "A100"),
        ("FlashAttention-3, head 64", "H100"),
        ("FlashAttention-3, head 128", "H100"),
        ("FlashAttention-3, head 256", "H100"),
        ("Triton's fused attention, head 128", "H100"),
        ("cuBLAS", "H100"),
        ("FlashMLA", "H100"),
    ],
)
def test_a_published_kernel_of_each_family_is_predicted_within_15_percent(name: str, card: str) -> None:
    errors = [kernel.error() for kernel in KERNELS if kernel.name.startswith(name) and kernel.card == card]
    assert min(abs(error) for error in errors) <= 0.15
    assert abs(sum(errors) / len(errors)) <= 0.15


@pytest.mark.sampled(2)
@pytest.mark.parametrize("card", list(RATES))
@pytest.mark.parametrize("field", ["moved", "cached", "products", "instructions", "shared", "programs"])
def test_more_work_never_takes_less_time(card: str, field: str) -> None:
    times = [
        estimate(
            replace(WORK, **{field: type(getattr(WORK, field))(getattr(WORK, field) * factor)}), RATES[card]
        ).seconds
        for factor in (1, 1.5, 2, 4, 16)
    ]
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


def test_instructions_are_counted_by_pipe() -> None:
    code = Counter(
        {"FFMA": 4, "MUFU.EX2": 2, "ISETP.GE.AND": 3, "LDSM.16.M88.4": 1, "HMMA.16816.F32.BF16": 8, "BRA": 1}
    )
    found, issued, shared = lanes(code, warps=2)
    assert found == {"fma": 256, "special": 128, "alu": 192, "memory": 64}
    assert issued == 2 * code.total()
    assert shared == 2 * 32 * 16


def test_a_product_of_one_row_takes_the_time_of_its_weights() -> None:
    rates = RATES["H100"]
    times = [sum(estimate(work, rates).seconds for work in library_product(rates, 1, n, n)) for n in (4096, 8192)]
    least = [2 * n * n / rates.memory_bandwidth for n in (4096, 8192)]
    assert all(bound < seconds < 2 * bound for bound, seconds in zip(least, times, strict=True))


def test_a_model_is_its_first_layer_and_the_difference_for_each_further_one() -> None:
    layer, head = Work("layer", 1, lanes=expect.Lanes()), Work("head", 1, lanes=expect.Lanes())
    found = {
        "qwen3-0.6b, one stream, 1": expect.Traced({layer: 3.0, head: 1.0}, 5.0),
        "qwen3-0.6b, one stream, 2": expect.Traced({layer: 6.0, head: 1.0}, 9.0),
    }
    whole = expect.whole(found, "qwen3-0.6b", "one stream")
    assert whole.launches == {layer: 3.0 * 28, head: 1.0}
    assert whole.host == 5.0 + 4.0 * 27
    assert expect.outside(found, "qwen3-0.6b", "one stream") == 1.0


@pytest.mark.nightly
def test_attention_that_was_compiled_gets_a_time_and_a_bound() -> None:
    printed = run_on_stand_in("""
        import torch
        from benchmarks import gpu_figures
        from benchmarks.gpu.launches import Step, plans_of, works
        from benchmarks.gpu.model import estimate
        from benchmarks.gpu.rates import RATES
        with device.traced() as launches:
            gpu_figures.decoding(torch.device("cuda", 0), 64, 4096, 32, 8)
        attend = next(launch for launch in launches if launch.kernel is not None and "attend" in launch.name)
        for length in (4096, 8192):
            (work,) = works(attend, RATES["H100"], Step((1,) * 64, (length,) * 64, plans_of(launches)))
            found = estimate(work, RATES["H100"])
            print(found.bound, found.seconds * RATES["H100"].bandwidth / (64 * length * 8 * 128 * 4))
    """)
    for line in printed.splitlines():
        bound, over_roofline = line.split()
        assert bound == "memory"
        assert 1 < float(over_roofline) < 1.3


@pytest.mark.nightly
def test_a_product_of_few_rows_takes_little_more_time_than_its_weights() -> None:
    printed = run_on_stand_in("""
        import torch
        from benchmarks.gpu.launches import Step, library_product, works
        from benchmarks.gpu.model import estimate
        from benchmarks.gpu.rates import RATES
        from quire.ops.triton.linear import linear_of_few_rows
        gpu, rates = torch.device("cuda", 0), RATES["H200"]
        weight = torch.empty(28672, 4096, dtype=torch.bfloat16, device=gpu)
        for rows in (1, 8, 16):
            with device.traced() as launches:
                linear_of_few_rows(weight.new_empty(rows, 4096), weight, None)
            (work,) = [work for launch in launches for work in works(launch, rates, Step((1,), (1,)))]
            library = sum(estimate(work, rates).seconds for work in library_product(rates, rows, 28672, 4096))
            found = estimate(work, rates)
            print(found.seconds * rates.memory_bandwidth / weight.nbytes, found.seconds / library)
    """)
    for line in printed.splitlines():
        over_limit, over_library = line.split()
        assert 1 < float(over_limit) < 1.1
        assert float(over_library) < 1


def test_the_stored_figures_have_what_the_suite_compares() -> None:
    stored = json.loads((expect.ROOT / "benchmarks/results/gpu-expected.json").read_text())
    assert set(stored) <= set(expect.CARDS)
    for figures in stored.values():
        for figure in figures.values():
            assert {"value", "goal", "unit", "kernels"} <= set(figure)
            assert all(kernel["seconds"] > 0 and kernel["launches"] > 0 for kernel in figure["kernels"])
        assert figures["llama-3-8b, one stream, share of its limit"]["value"] >= 75
        assert figures["decode attention, 64 x 4096"]["kernels"][0]["name"] == "attend_kernel"


@pytest.mark.nightly
def test_a_long_request_among_short_ones_costs_no_more_than_equally_long_ones() -> None:
    printed = run_on_stand_in("""
        from benchmarks.gpu.skew import compare
        for card in ("H200", "H100"):
            for found in compare(card, device):
                print(found.ratio, found.undivided / found.even)
    """)
    for line in printed.splitlines():
        ratio, undivided = (float(value) for value in line.split())
        assert 1 <= ratio <= 1.15
        assert undivided > 3
