"""Texts of service level objectives."""

from __future__ import annotations

import pytest

from quire.bench.slo import Limit, parse


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft=500ms,itl=50ms", [Limit("ttft", 0.5), Limit("itl", 0.05)]),
        ("p90:TTFT = 1.5 s , e2e=10s", [Limit("ttft", 1.5, 90.0), Limit("e2e", 10.0)]),
        ("p99.9:tpot=2s", [Limit("tpot", 2.0, 99.9)]),
    ],
)
def test_limits_have_percentiles_and_units(text, limits):
    assert parse(text) == limits


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ttft", "must be a metric and a time"),
        ("latency=5ms", "metrics are ttft, itl, tpot, e2e"),
        ("ttft=500", "units ms and s"),
        ("itl=0ms", "a time above 0"),
        ("p101:itl=5ms", "a percentile of at most 100"),
        ("itl=5ms,itl=6ms", "limits something twice"),
    ],
)
def test_what_is_no_limit_is_named(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse(text)
