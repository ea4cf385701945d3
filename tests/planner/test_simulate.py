"""The simulation: the real scheduler with a clock that is set."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.checkpoints.hub import bundled_model
from quire.cli.models.facts import facts_of
from quire.kv.specs import attention_spec
from quire.planner.devices import DEVICES
from quire.planner.layout import Layout
from quire.planner.measure import StepClock
from quire.planner.memory import kv_groups
from quire.planner.roofline import RooflineTimes
from quire.planner.simulate import Replica, Run, simulate
from quire.planner.traffic import PIECE, Arrival, Traffic
from quire.planner.work import StepWork, Window
from quire.scheduler.limits import SchedulerLimits
from support.engines import make_llm


@dataclass
class Constant:
    """Steps that take equally long on each stage, and a host that takes as long for each step."""

    seconds: float = 1.0
    stages_: int = 1
    of_host: float = 0.0
    works: list[StepWork] = field(default_factory=list)
    windows: tuple[Window, ...] = (None,)

    def stages(self, works: Sequence[StepWork]) -> list[float]:
        self.works += works
        return [self.seconds] * self.stages_

    def host(self, works: Sequence[StepWork]) -> float:
        return self.of_host


def replica(blocks: int = 1000, rows: int = 16, tokens: int = 64, depth: int = 1, stages: int = 1) -> Replica:
    limits = SchedulerLimits(rows, tokens, 4096, depth=depth, stages=stages)
    return Replica(limits, blocks, [attention_spec([0])], 16)


REQUESTS = st.lists(
    st.tuples(st.floats(0, 50), st.integers(1, 200), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=25
)


@settings(max_examples=60, deadline=None)
@given(
    REQUESTS,
    st.sampled_from([(1, False), (3, False), (3, True)]),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 3)]),
    st.integers(260, 400),
)
def test_all_requests_end_with_their_tokens(requests, replicas, flights, blocks):
    arrivals = [
        Arrival(time, PIECE * pieces + prompt, output, tuple(range(pieces)))
        for time, prompt, output, pieces in sorted(requests)
    ]
    count, together = replicas
    depth, stages = flights
    times = Constant(0.5, stages, of_host=0.1)
    run = simulate(Traffic(arrivals), replica(blocks, depth=depth, stages=stages), times, count, together)
    assert len(run.requests) == len(arrivals)
    for arrival, served in zip(arrivals, run.requests, strict=True):
        assert len(served.tokens) == arrival.output
        assert served.arrival == arrival.time
        assert served.tokens[0] >= arrival.time + 0.5 * stages
        gaps = np.diff(np.frombuffer(served.tokens))
        assert (gaps > 0).all()
        assert 0 <= served.cached < arrival.prompt
    assert run.seconds == max(served.tokens[-1] for served in run.requests)
    assert 0 < run.usage <= 1
    sampled = sum(work.places for work in times.works)
    assert sampled == sum(arrival.output for arrival in arrivals)
    if not any(served.preemptions or served.cached for served in run.requests):
        computed = sum(work.tokens for work in times.works if work.places or work.prompts or not together)
        least = sum(arrival.prompt + arrival.output - 1 for arrival in arrivals)
        assert computed >= least if together else computed == least


def times_of(run: Run) -> list[list[float]]:
    return [list(served.tokens) for served in run.requests]


def test_a_prompt_waits_for_the_step_that_runs():
    run = simulate(Traffic([Arrival(0.0, 10, 3), Arrival(0.5, 10, 1)]), replica(), Constant())
    assert times_of(run) == [[1.0, 2.0, 3.0], [2.0]]


def test_long_prompts_are_computed_in_chunks():
    run = simulate(Traffic([Arrival(0.0, 150, 1)]), replica(tokens=64), Constant())
    assert times_of(run) == [[3.0]]
    assert run.steps == 3


def test_a_second_step_in_flight_hides_the_host():
    traffic = Traffic([Arrival(0.0, 10, 5)])
    one = simulate(traffic, replica(depth=1), Constant(1.0, of_host=0.5))
    two = simulate(traffic, replica(depth=2), Constant(1.0, of_host=0.5))
    assert np.diff(one.requests[0].tokens) == pytest.approx([1.5] * 4)
    assert np.diff(two.requests[0].tokens) == pytest.approx([1.0] * 4)
    slow = simulate(traffic, replica(depth=2), Constant(1.0, of_host=3.0))
    assert np.diff(slow.requests[0].tokens) == pytest.approx([3.0] * 4)


def test_stages_work_on_different_requests_at_once():
    traffic = Traffic([Arrival(0.0, 10, 10) for _ in range(8)])
    one = simulate(traffic, replica(), Constant(2.0))
    staged = simulate(traffic, replica(depth=2, stages=2), Constant(1.0, 2))
    assert staged.seconds < 1.3 * one.seconds  # each step has half of the requests
    alone = simulate(Traffic(traffic.arrivals[:1]), replica(depth=2, stages=2), Constant(1.0, 2))
    assert np.diff(alone.requests[0].tokens) == pytest.approx([2.0] * 9)


def test_replicas_take_turns():
    traffic = Traffic([Arrival(0.0, 10, 5) for _ in range(32)])
    one, two = (simulate(traffic, replica(tokens=1000), Constant(), count) for count in (1, 2))
    assert one.most_running == two.most_running == 16
    assert one.seconds == 2 * two.seconds


def test_replicas_that_share_experts_run_their_steps_together():
    times = Constant()
    simulate(Traffic([Arrival(0.0, 10, 3)]), replica(), times, 4, together=True)
    assert len(times.works) == 3 * 4
    assert [work.places for work in times.works] == [1, 0, 0, 0] * 3


def test_equal_beginnings_are_computed_once():
    arrivals = [Arrival(100.0 * i, PIECE + 20, 2, (7,)) for i in range(3)]
    run = simulate(Traffic(arrivals), replica(tokens=4096), Constant())
    assert [served.cached for served in run.requests] == [0, PIECE, PIECE]


@pytest.mark.parametrize("groups", [[attention_spec([0])], [attention_spec([0]), attention_spec([1], window=50)]])
def test_blocks_that_the_traffic_cannot_fill_change_nothing_but_the_usage(groups):
    rng = random.Random(0)
    arrivals = [Arrival(number, PIECE + rng.randint(1, 200), rng.randint(1, 40), (number % 3,)) for number in range(40)]
    limits = SchedulerLimits(16, 64, 4096, depth=2)
    enough, vast = (
        simulate(Traffic(arrivals), Replica(limits, blocks, groups, 16), Constant(), 2) for blocks in (1500, 10**12)
    )
    assert times_of(vast) == times_of(enough)
    assert [served.cached for served in vast.requests] == [served.cached for served in enough.requests]
    assert sum(served.preemptions for served in vast.requests) == 0
    assert vast.usage * 10**12 == pytest.approx(enough.usage * 1500)


def test_too_small_a_cache_preempts():
    run = simulate(Traffic([Arrival(0.0, 60, 60) for _ in range(8)]), replica(blocks=257, rows=8), Constant())
    assert sum(served.preemptions for served in run.requests) == 0
    limits = SchedulerLimits(8, 64, 256)
    tight = Replica(limits, 30, [attention_spec([0])], 16)
    run = simulate(Traffic([Arrival(0.0, 60, 60) for _ in range(8)]), tight, Constant())
    assert sum(served.preemptions for served in run.requests) > 0
    assert all(len(served.tokens) == 60 for served in run.requests)


def test_a_hopeless_run_is_given_up():
    traffic = Traffic([Arrival(0.01 * i, 60, 60) for i in range(200)])
    run = simulate(traffic, replica(rows=4), Constant(), latest=20.0)
    assert run.seconds < 100
    assert not run.requests[-1].tokens


def test_the_steps_are_those_of_a_real_engine():
    """All requests at once: which tokens of which requests each step computes does not depend on the clock."""
    llm = make_llm(
        bundled_model(),
        max_num_seqs=6,
        max_num_batched_tokens=48,
        max_model_len=300,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    footprint = facts_of(bundled_model()).footprint
    assert footprint is not None
    windows = RooflineTimes(footprint, Layout(), DEVICES["H100"]).windows
    clock, rng = StepClock(llm, windows), random.Random(3)
    arrivals = [Arrival(0.0, rng.randint(1, 150), rng.randint(1, 40)) for _ in range(20)]
    for arrival in arrivals:
        clock.add(rng, arrival.prompt, arrival.output)
    real = [sample.work for sample in clock.steps()]
    limits, kv = llm.core.scheduler.limits, llm.core.scheduler.kv
    times = Constant(windows=windows)
    simulate(Traffic(arrivals), Replica(limits, kv.pool.num_usable, kv_groups(footprint, 300), kv.block_size), times)
    assert times.works == real
    llm.shutdown()
