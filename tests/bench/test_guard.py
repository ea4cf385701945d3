"""The comparison of two commits: its verdicts, and what it says of a real pair."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "guard.py"


@pytest.fixture(scope="module")
def guard():
    spec = importlib.util.spec_from_file_location("guard", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["guard"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rounds(seed: int, ratio: float) -> tuple[list[float], list[float]]:
    """Nine pairs from a machine whose speed drifts by tens of percents, and by 2 % within a pair."""
    rng = random.Random(seed)
    old = [rng.uniform(0.8, 1.3) for _ in range(9)]
    return old, [seconds * ratio * rng.uniform(0.98, 1.02) for seconds in old]


@pytest.mark.parametrize(("ratio", "word"), [(1.06, "SLOWER"), (0.94, "faster")])
def test_a_difference_above_the_noise_is_told(guard, ratio, word):
    assert [guard.judge(*rounds(seed, ratio)).word for seed in range(20)] == [word] * 20


def test_equal_commits_are_rarely_told_apart(guard):
    words = [guard.judge(*rounds(seed, 1.0)).word for seed in range(100)]
    assert words.count("noise") >= 90


def test_a_difference_too_small_to_matter_is_noise_however_sure(guard):
    assert guard.judge([1.0] * 9, [1.005] * 9).word == "noise"


def test_few_rounds_prove_nothing(guard):
    assert guard.judge([1.0, 1.0], [2.0, 2.0]).word == "noise"
