"""The GPU suite runs, in small and on a CPU if need be: with a GPU at hand is no time to find its mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).parents[2] / "benchmarks" / "gpu_suite.py"


def test_the_suite_runs_in_small_and_writes_what_it_found(tmp_path):
    command = [sys.executable, str(SUITE), "--small", "--out", str(tmp_path), "--only", "kernels", "attention", "0.6B"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "gpu-suite.json").read_text())
    assert {*results} == {"machine", "kernels", "attention", "0.6B"}
    assert results["machine"]["read_bytes_s"] > 1e8
    assert results["attention"]["prefill_share"] > 0
    assert results["0.6B"]["many_output_tokens"] > 0
    assert not results["0.6B"]["failures"]
    assert "| 0.6B, CUDA graphs on / off |" in done.stdout
    assert (tmp_path / "gpu-suite.png").stat().st_size > 10_000


def test_a_section_that_fails_does_not_stop_the_others_and_is_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SUITE.parent))
    import gpu_suite

    assert gpu_suite._last('noise\n{"a": 1}\n[2]\n{"b":') == {"a": 1}
    made = gpu_suite._in_process("no such section", 30, True, {})
    assert made["error"].startswith("ended with 1")
    assert gpu_suite._in_process("machine", 1, True, {}) == {"error": "no time was left"}
    assert gpu_suite._checked([("good", lambda: None), ("bad", lambda: 1 / 0)]) == {
        "passed": 1, "failures": {"bad": "ZeroDivisionError: division by zero"},
    }  # fmt: skip
    shown = gpu_suite.table({"machine": {"device": "a"}, "greedy": {"passed": 1, "failures": {"bad": "why\nnot"}}})
    assert "greedy: 1 passed, 1 failed" in shown
    assert "    bad: why" in shown
