"""When a core counts as hanging: it has work, and has completed no step for too long."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.engine import ConfigError, EngineConfig
from quire.engine.progress import Beats, Progress, Watchdog
from quire.messages.changes import Pause, Resume
from quire.messages.engine import Heartbeat
from quire.messages.step import SchedulerOutput
from support.engines import core_request, finish, make_llm


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def a_step(num_tokens: int = 1, encode: Any = ()) -> SchedulerOutput:
    return SchedulerOutput(0, rows=[0], num_tokens=[num_tokens], encode=list(encode))


def beat(waited: float, num_tokens: int = 1, **fields: Any) -> Heartbeat:
    return Heartbeat(waited, num_tokens, **{"has_run": True, **fields})


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(progress: Progress, clock: Clock, *steps: tuple[SchedulerOutput, float]) -> None:
    for step, seconds in steps:
        progress.begin()
        progress.submit(step)
        clock.now += seconds
        progress.complete(step, [])


def test_a_minute_is_allowed_at_least():
    watchdog = Watchdog(None)
    assert watchdog.problem(beat(60.0, longest=0.1)) is None
    assert "no step" in watchdog.problem(beat(60.1, longest=0.1))


def test_ten_times_the_longest_step_is_allowed():
    watchdog = Watchdog(None)
    assert watchdog.problem(beat(0, longest=9.0, most_tokens=1)) is None
    assert watchdog.problem(beat(90.0)) is None
    assert watchdog.problem(beat(90.1)) is not None


def test_a_step_with_more_tokens_than_any_before_may_take_longer_in_proportion():
    watchdog = Watchdog(None)
    assert watchdog.problem(beat(0, longest=7.0, most_tokens=100)) is None
    assert watchdog.problem(beat(279.0, num_tokens=400)) is None
    assert watchdog.problem(beat(281.0, num_tokens=400)) is not None
    assert watchdog.problem(beat(71.0, num_tokens=100)) is not None


def test_the_first_step_may_compile():
    watchdog = Watchdog(None)
    assert watchdog.problem(beat(599.0, has_run=False)) is None
    assert watchdog.problem(beat(601.0, has_run=False)) is not None


def test_the_first_step_of_a_core_that_replaces_another_has_no_such_grace():
    watchdog = Watchdog(None)
    assert watchdog.problem(beat(0)) is None
    assert watchdog.problem(beat(61.0, has_run=False)) is not None


def test_the_first_step_that_encodes_media_may_compile():
    watchdog = Watchdog(None)
    assert watchdog.problem(beat(500.0, encodes=True)) is None
    assert watchdog.problem(beat(500.0, encodes=True, has_encoded=True)) is not None


def test_any_step_may_compile_with_torch_compile():
    watchdog = Watchdog(None, compiles=True)
    assert watchdog.problem(beat(599.0, longest=0.1)) is None
    assert watchdog.problem(beat(601.0)) is not None


def test_a_given_limit_replaces_the_computed_one():
    watchdog = Watchdog(3.0)
    assert watchdog.problem(beat(2.9, longest=100.0)) is None
    assert "--watchdog-timeout: 3 s" in watchdog.problem(beat(3.1, longest=100.0))


def test_zero_switches_the_watchdog_off():
    assert Watchdog(0).problem(beat(1e6)) is None


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_limit_that_is_no_time_is_refused(value):
    with pytest.raises(ConfigError, match="watchdog_timeout must be"):
        EngineConfig.create(watchdog_timeout=value)


def test_time_without_work_does_not_count(clock):
    progress, beats = Progress(clock), Beats(clock)
    run(progress, clock, (a_step(), 1.0))
    progress.stop()
    for _ in range(100):
        clock.now += 1
        assert beats.next(progress).waited == 0


def test_time_in_a_step_counts_until_it_is_completed(clock):
    progress, beats = Progress(clock), Beats(clock)
    progress.begin()
    progress.submit(a_step(7))
    for seconds in range(1, 30):
        clock.now += 1
        made = beats.next(progress)
        assert (made.waited, made.num_tokens) == (seconds, 7)
    progress.complete(a_step(7), [])
    clock.now += 1
    assert beats.next(progress).waited == 1


def test_steps_in_flight_count_by_the_largest_one(clock):
    progress = Progress(clock)
    progress.begin()
    progress.submit(a_step(500))
    progress.submit(a_step(3))
    assert progress.num_tokens == 500
    progress.complete(a_step(500), [a_step(3)])
    assert progress.num_tokens == 3


def test_the_first_step_does_not_raise_the_limit(clock):
    progress = Progress(clock)
    run(progress, clock, (a_step(), 50.0), (a_step(), 2.0), (a_step(encode=["picture"]), 30.0), (a_step(), 1.0))
    assert progress.longest == 2.0


def test_time_for_which_the_process_was_stopped_does_not_count(clock):
    progress, beats = Progress(clock), Beats(clock)
    progress.begin()
    clock.now += 1
    beats.next(progress)
    clock.now += 3600
    assert beats.next(progress).waited <= 3


def test_a_core_owes_progress_only_while_it_has_work(checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    core, since = llm.core, []
    submit = core.executor.submit

    def submitted(step: SchedulerOutput) -> None:
        since.append(core.progress.since)
        submit(step)

    core.executor.submit = submitted
    core.add_request(core_request(llm, "0", [5, 6, 7]))
    assert core.progress.since is None
    finish(core)
    assert since
    assert None not in since
    assert core.progress.since is None
    assert core.progress.has_run


def test_a_core_owes_no_progress_while_it_carries_out_a_command_or_is_paused(checkpoints, monkeypatch):
    llm = make_llm(checkpoints.path("llama"))
    core, since = llm.core, []
    core.add_request(core_request(llm, "0", [5, 6, 7]))
    core.step()
    assert core.progress.since is not None
    begin = core._begin_pause

    def begin_pause(command: Pause) -> Any:
        since.append(core.progress.since)
        return begin(command)

    monkeypatch.setattr(core, "_begin_pause", begin_pause)
    core.carry_out(Pause("keep"))
    assert since == [None]
    assert core.progress.since is None
    core.carry_out(Resume())
    finish(core)
