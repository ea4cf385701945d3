"""What `quire bench serve` makes of outcomes whose times are known."""

from __future__ import annotations

from itertools import pairwise

import pytest

from quire.bench.report import summarize, table
from quire.bench.serve import Outcome


def outcome(start: float, token_times: list[float], error: str = "") -> Outcome:
    """A request that got a token at each of these times, on the clock of the run."""
    gaps = [b - a for a, b in pairwise(token_times)]
    ttft, latency = token_times[0] - start, token_times[-1] - start
    return Outcome(start, 10, len(token_times), ttft=ttft, latency=latency, itls=gaps, error=error)


@pytest.mark.parametrize(
    ("duration", "times", "peak"),
    [
        (0.5, [0.1, 0.2, 0.3, 0.4], 8.0),  # less than a second is no reason for fewer tokens per second
        (1.5, [0.1, 1.4], 2 / 1.5),  # one window of 1.5 s
        (2.5, [0.1, 0.2, 0.3, 2.4], 3 / 1.25),  # two windows of 1.25 s
        (4.0, [0.5, 1.1, 1.2, 1.3, 1.4, 3.5], 4.0),
        (3.0, [3.0], 1.0),  # the last window holds its end
    ],
)
def test_the_peak_is_that_of_the_best_second_and_never_below_the_mean(duration, times, peak):
    result = summarize([outcome(0.0, times)], duration, [], [], {})
    assert result["max_output_tokens_per_s"] == pytest.approx(peak)
    assert result["max_output_tokens_per_s"] >= result["output_throughput"] - 1e-9
    assert f"{peak:,.1f} /s" in table(result, [outcome(0.0, times)], [])


def test_failed_requests_are_in_no_rate_but_were_running():
    outcomes = [outcome(0.0, [0.5, 1.0]), outcome(0.2, [0.4], error="HTTP 500")]
    result = summarize(outcomes, 1.0, ["ttft"], [50], {"ttft": 600.0})
    assert result["output_throughput"] == result["max_output_tokens_per_s"] == 2
    assert (result["completed"], result["failed"], result["max_concurrent_requests"]) == (1, 1, 2)
    assert (result["request_goodput"], result["p50_ttft_ms"]) == (1, 500)


def test_nothing_that_succeeded_has_no_rates():
    result = summarize([outcome(0.0, [0.4], error="HTTP 500")], 1.0, ["ttft"], [99], {})
    assert result["max_output_tokens_per_s"] == result["output_throughput"] == 0
    assert result["mean_ttft_ms"] is None


def test_an_answer_that_came_in_one_piece_says_nothing_of_the_time_per_token():
    whole = Outcome(0.0, 10, output_len=50, ttft=2.0, latency=2.0)
    result = summarize([whole, outcome(0.0, [0.5, 1.0])], 2.0, ["tpot"], [], {})
    assert result["mean_tpot_ms"] == pytest.approx(500)
    assert summarize([whole], 2.0, ["tpot"], [], {})["mean_tpot_ms"] is None
