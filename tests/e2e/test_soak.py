"""benchmarks/soak.py for some seconds: it must find nothing on a sound server, and name what does not return."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak import KINDS, SHARES, Counts

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
COUNTS = Counts(processes=3, rss=10**9, pss=10**9, descriptors=50, threads=20, blocks=0.0, segments=2)


@pytest.mark.nightly
def test_a_short_soak_of_one_core_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, SOAK, "--minutes", "0.15", "--clients", "3", "--only", "one core"]
    found = subprocess.run(
        [*command, "--json", tmp_path / "soak.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    results = json.loads((tmp_path / "soak.json").read_text())
    assert results["faults"] == []
    assert [phase["name"] for phase in results["phases"]] == list(SHARES)
    assert {kind for phase in results["phases"] for kind in phase["seen"]["answers"]} >= set(KINDS)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"descriptors": 51}, "descriptors 50 -> 51"),
        ({"threads": 21}, "threads 20 -> 21"),
        ({"segments": 3}, "segments 2 -> 3"),
        ({"processes": 4}, "processes 3 -> 4"),
        ({"blocks": 0.5}, "blocks 0.5000"),
        ({"pss": 1_101_000_000}, "memory 1000 -> 1101 MB"),
    ],
)
def test_what_has_not_returned_is_named(change: dict[str, int], found: str) -> None:
    assert replace(COUNTS, **change).excess(COUNTS) == [found]


def test_less_than_before_is_no_leak() -> None:
    after = Counts(processes=2, rss=0, pss=1_099_000_000, descriptors=49, threads=19, blocks=0.0, segments=1)
    assert after.excess(COUNTS) == []
