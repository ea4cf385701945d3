"""The GPU suite runs without a GPU, so that the first minutes on a card are not spent on its mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "benchmarks" / "gpu_suite.py"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(SUITE.parents[1]))
    monkeypatch.syspath_prepend(str(SUITE.parent))
    import gpu_suite

    return gpu_suite


def run(folder: Path, *options: str) -> tuple[dict[str, dict], str]:
    """The results of the suite, and what it printed. Triton's interpreter is off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SUITE), "--out", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads((folder / "gpu-suite.json").read_text()), done.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_the_suite_runs_in_small_and_saves_its_results(tmp_path):
    results, printed = run(tmp_path, "--small", "--only", "kernels", "attention", "0.6B", "sums of ranks")
    assert {*results} == {"machine", "kernels", "attention", "0.6B", "sums of ranks"}
    assert results["machine"]["read_bytes_s"] > 1e8
    assert results["attention"]["prefill_share"] > 0
    assert results["0.6B"]["many_output_tokens"] > 0
    assert not results["0.6B"]["failures"]
    assert results["sums of ranks"]["shared memory 65536 bytes, us"] > 0
    assert "| 0.6B, CUDA graphs on / off |" in printed
    assert (tmp_path / "gpu-suite.png").stat().st_size > 10_000


@pytest.mark.nightly
@pytest.mark.slow
def test_sections_run_on_a_stand_in_for_a_card_and_the_tiles_start_from_the_results_of_an_earlier_run(tmp_path):
    pytest.importorskip("triton")
    results, printed = run(tmp_path, "--stand-in", "sm_90", "--only", "attention")
    assert results["machine"]["device"] == "NVIDIA H100"
    kernels = {kernel["name"] for kernel in results["attention"]["kernels"]["decode attention, 64 x 4096"]}
    assert "attend_kernel" in kernels
    assert "| attend_kernel | 1 |" in printed
    results, _ = run(tmp_path, "--stand-in", "sm_90", "--only", "tiles")
    tried = results["tiles"]["tried"]["prefill attention, 2 x 8192: attend_kernel"]["tried_us"]
    kinds = {name.split("=")[0] for name in tried}
    assert {"its own tile", "num_warps", "num_stages", "KEYS", "rows"} <= kinds


@pytest.mark.nightly
def test_the_whole_suite_runs_on_a_stand_in_for_a_card(tmp_path):
    pytest.importorskip("triton")
    results, _ = run(tmp_path, "--stand-in", "sm_90")
    assert not [name for name, result in results.items() if "error" in result]
    for name in ("greedy", "two ranks", "kernels", "attention kernels"):
        assert results[name]["passed"]
    for name in ("0.6B", "8B"):
        assert len(results[name]["kernels"]) == 2


@pytest.mark.slow
def test_a_section_that_fails_does_not_stop_the_others_and_is_reported(suite, tmp_path):
    assert suite.last_result('noise\n{"a": 1}\n[2]\n{"b":') == {"a": 1}
    failed = suite.run_process("no such section", 30, ["--out", str(tmp_path)])
    assert failed["error"].startswith("ended with exit code 1")
    assert suite.run_process("machine", 1, []) == {"error": "no time was left"}
    assert suite._checked([("good", lambda: None), ("bad", lambda: 1 / 0)]) == {
        "passed": 1,
        "failures": {"bad": "ZeroDivisionError: division by zero"},
    }
    shown = suite.table({"machine": {"device": "a"}, "greedy": {"passed": 1, "failures": {"bad": "why\nnot"}}})
    assert "greedy: 1 passed, 1 failed" in shown
    assert "    bad: why" in shown


def test_the_three_kernels_that_lose_most_time_are_named(suite, monkeypatch):
    from benchmarks.gpu import kernels

    def kernel(name: str, microseconds: float) -> dict:
        return {"name": name, "seconds": microseconds / 1e6, "launches": 2}

    wanted = {"step": {"kernels": [kernel("a_kernel", 1), kernel("b_kernel", 9), kernel("mm", 5), kernel("_c", 5)]}}
    monkeypatch.setattr(kernels, "expected", lambda name: wanted)
    measured = kernels.summed(
        [kernel("a_kernel", 3), kernel("b_kernel", 9), kernel("nvjet_tst_64x8", 8), kernel("gemvx", 1), kernel("_c", 6)]
    )
    printed = suite.table({"8B": {"kernels": {"step": measured}}})
    assert "| a_kernel | 2 | 3.0 | 1.0 | 3.00 |" in printed
    assert "| matrix products of torch | 4 | 9.0 | 5.0 | 1.80 |" in printed
    lost = [line.split(": ")[1] for line in printed.splitlines() if "loses" in line]
    assert lost == [
        "matrix products of torch loses 4.0 us a step",
        "a_kernel loses 2.0 us a step",
        "_c loses 1.0 us a step",
    ]


def test_expected_times_are_found_by_the_name_of_the_card(suite, tmp_path):
    from benchmarks.gpu import kernels

    file = tmp_path / "expected.json"
    file.write_text(json.dumps({"H200": {"a": 1}, "A100": {"b": 2}}))
    assert kernels.expected("NVIDIA H200", file) == {"a": 1}
    assert kernels.expected("NVIDIA A100-SXM4-80GB", file) == {"b": 2}
    assert kernels.expected("NVIDIA L4", file) == {}
    assert kernels.expected("NVIDIA L4", tmp_path / "missing.json") == {}


def test_the_best_of_other_tiles_is_found_and_tiles_that_do_not_fit_are_left_out(suite):
    from types import SimpleNamespace

    from benchmarks.gpu.kernels import Launch, try_tiles

    last = {}

    def run(x, KEYS, *, grid, warmup, num_warps, num_stages):  # noqa: N803
        if num_stages > 3:
            raise RuntimeError("out of resource: shared memory")
        last["seconds"] = (100 / KEYS + num_warps) * num_stages

    def clock(launch):
        launch()
        return last["seconds"]

    kernel = SimpleNamespace(run=run, arg_names=["x", "KEYS"])
    tried = try_tiles(Launch(kernel, {"x": 0, "KEYS": 32}, (1,), {"num_warps": 4, "num_stages": 3}), clock)
    assert tried["best"] == "num_warps=2, num_stages=2, KEYS=64"
    assert tried["best_us"] == (100 / 64 + 2) * 2 * 1e6
    assert "num_stages=4" not in tried["tried_us"]
