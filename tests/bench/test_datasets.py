"""Arrival times and files of requests."""

import numpy as np
import pytest

from quire.bench.datasets import RandomPrompts, arrival_times, random_requests, read_requests


@pytest.fixture
def prompts():
    return RandomPrompts(np.random.default_rng(0), 500)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_between_arrivals_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    times = np.array(arrival_times(20_000, 8.0, burstiness, np.random.default_rng(3)))
    gaps = np.diff(times, prepend=0)
    assert (gaps >= 0).all()
    assert times[-1] == pytest.approx(20_000 / 8)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)  # of a gamma distribution


def test_gaps_of_burstiness_one_are_those_of_a_poisson_process():
    times = np.array(arrival_times(20_000, 8.0, 1.0, np.random.default_rng(3)))
    per_second = np.bincount(times.astype(int))[:-1]
    assert per_second.mean() == pytest.approx(8, rel=0.02)
    assert per_second.var() == pytest.approx(8, rel=0.1)


def test_an_infinite_rate_sends_all_at_once():
    assert arrival_times(3, float("inf"), 1.0, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_lengths_are_spread_evenly_around_those_asked_for(prompts):
    requests = random_requests(prompts, 4000, 100, 10, range_ratio=0.2)
    assert {r.prompt_len for r in requests} == set(range(80, 121))
    assert {r.output_len for r in requests} == set(range(8, 13))
    assert np.mean([r.prompt_len for r in requests]) == pytest.approx(100, rel=0.01)
    assert all(len(r.prompt) == r.prompt_len for r in requests)


def test_arrivals_of_a_trace_begin_at_zero_and_are_sorted(prompts, tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival": 7.5, "input_length": 3}\n{"arrival": 6, "input_length": 4, "output_length": 9}\n')
    requests = read_requests(file, prompts, output_len=5, timed=True)
    assert [(r.arrival, r.prompt_len, r.output_len) for r in requests] == [(0.0, 4, 9), (1.5, 3, 5)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"arrival": 1}',
        '{"arrival": "x", "prompt": "a"}',
        '{"arrival": 1, "input_length": 0}',
        '{"arrival": 1, "prompt": ""}',
        '{"arrival": 1, "prompt": [1, "a"]}',
        '{"prompt": "a"}',
    ],
)
def test_a_line_that_is_wrong_is_named(prompts, tmp_path, line):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival": 0, "prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_requests(file, prompts, 5, timed=True)
