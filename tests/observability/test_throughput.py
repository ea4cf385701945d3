"""The periodic log line of an engine's throughput."""

from __future__ import annotations

import logging

import pytest

from quire.messages.engine import CoreStats, SpeculationStats
from quire.observability import throughput
from quire.observability.throughput import LOG_SECONDS, ThroughputLog
from support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log lines so far."""
    said: list[str] = []
    logger = logging.getLogger("quire")
    monkeypatch.setattr(logger, "info", lambda message, *arguments: said.append(message % arguments))
    return said


def test_a_line_has_the_mean_rates_over_the_time_with_work(clock: Clock, lines: list[str]):
    log = ThroughputLog()
    log.begin_work()
    clock.now += 4
    log.step(CoreStats(num_running=3, num_waiting=2, kv_cache_usage=0.25), 400, 20, 400, 100)
    assert not lines
    log.end_work()
    clock.now += 90  # idle
    log.begin_work()
    clock.now += 6
    log.step(CoreStats(num_running=1, num_waiting=0, kv_cache_usage=0.5), 200, 30, 0, 0)
    [line] = lines
    assert line.startswith("Running 1, waiting 0; computed 60.0 prompt tokens/s, generated 5.0 tokens/s in 10.0 s of")
    assert line.endswith("KV cache 50.0 % in use, prefix cache hits 25.0 %")


def test_each_line_counts_from_the_one_before(clock: Clock, lines: list[str]):
    log = ThroughputLog()
    log.begin_work()
    for generated in (100, 200):
        clock.now += LOG_SECONDS
        log.step(CoreStats(), 0, generated, 0, 0)
    assert "generated 10.0 tokens/s in 10.0 s" in lines[0]
    assert "generated 20.0 tokens/s in 10.0 s" in lines[1]
    assert all(line.endswith("prefix cache hits none looked up") for line in lines)


def test_idle_time_before_the_first_request_does_not_count(clock: Clock, lines: list[str]):
    log = ThroughputLog()
    clock.now += 100
    log.begin_work()
    clock.now += 1
    log.step(CoreStats(), 10, 1, 0, 0)
    assert not lines
    clock.now += LOG_SECONDS
    log.step(CoreStats(), 0, 10, 0, 0)
    assert "generated 1.0 tokens/s in 11.0 s" in lines[0]


def test_a_line_says_how_many_drafts_were_accepted_since_the_one_before(clock: Clock, lines: list[str]):
    log = ThroughputLog()
    log.begin_work()
    first, second = SpeculationStats(100, 400, 300, [90, 80, 70, 60]), SpeculationStats(110, 420, 305, [93, 82, 70, 60])
    for stats in (first, second, None, SpeculationStats(5, 10, 10, [5, 5]), SpeculationStats(6, 12, 10, [5, 5])):
        clock.now += LOG_SECONDS
        log.step(CoreStats(speculation=stats), 0, 50, 0, 0)
    accepted = "; mean acceptance length 4.00, drafts accepted 75 % (by position 0.90 0.80 0.70 0.60)"
    assert lines[0].endswith(accepted)
    assert lines[1].endswith("; mean acceptance length 1.50, drafts accepted 25 % (by position 0.30 0.20)")
    assert lines[2].endswith("none looked up")
    assert lines[3].endswith("; mean acceptance length 3.00, drafts accepted 100 % (by position 1.00 1.00)")
    assert lines[4].endswith("; mean acceptance length 1.00, drafts accepted 0 %")


def test_preemptions_since_the_line_before_are_told_of(clock: Clock, lines: list[str]):
    log = ThroughputLog()
    log.begin_work()
    for preemptions in (3, 0):
        clock.now += LOG_SECONDS / 2
        log.step(CoreStats(), 0, 50, 100, 25, preemptions)
        clock.now += LOG_SECONDS / 2
        log.step(CoreStats(), 0, 50, 0, 0, preemptions)
    assert lines[0].endswith("prefix cache hits 25.0 %, preemptions 6")
    assert lines[1].endswith("prefix cache hits 25.0 %")
