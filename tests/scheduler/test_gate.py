"""Requests that wait at a gate are outside the queue, delay nobody, and come back to their old place."""

from __future__ import annotations

from collections.abc import Callable

from test_scheduler import answer, counts, make_request

from quire.kv.specs import CacheEntry, FullAttentionSpec
from quire.messages.engine import EngineCoreRequest, FinishReason
from quire.platform.untrusted.limits import BusyError
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import Status
from quire.scheduler.scheduler import Scheduler


class Doors:
    """Lets requests pass that are not in `closed`; those in `broken` can never run."""

    def __init__(self, *closed: str) -> None:
        self.closed, self.broken, self.busy = set(closed), set[str](), set[str]()

    def ready(self, request: EngineCoreRequest) -> bool:
        if request.request_id in self.broken:
            raise ValueError("the grammar has no end")
        if request.request_id in self.busy:
            raise BusyError("other requests took the time")
        return request.request_id not in self.closed

    def connect(self, wake: Callable[[], None]) -> None:
        """The tests call Scheduler.wake themselves."""


def make_scheduler(*gates: Doors, num_blocks: int = 64, max_num_seqs: int = 8, max_model_len: int = 64) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, 64, max_model_len)
    return Scheduler(limits, num_blocks, [FullAttentionSpec((CacheEntry(0),))], 4, gates=gates)


def enter(scheduler: Scheduler) -> list[str]:
    """The requests that enter with the next step, which is retired."""
    assert scheduler.open_gates() == []
    step = scheduler.schedule()
    if step.rows:
        answer(scheduler, step, *[9] * len(step.rows))
    return [new.request_id for new in step.new_requests]


def test_a_request_at_a_closed_gate_delays_no_other_and_takes_its_old_place() -> None:
    doors = Doors("first")
    scheduler = make_scheduler(doors, max_num_seqs=1)
    for number, name in enumerate(["first", "second", "third"]):
        scheduler.add(make_request(name, [1, 2], max_tokens=1, arrival=float(number)))
    assert enter(scheduler) == ["second"]
    doors.closed.clear()
    scheduler.wake()
    assert enter(scheduler) == ["first"]
    assert enter(scheduler) == ["third"]


def test_every_gate_must_let_a_request_pass() -> None:
    doors = [Doors("a"), Doors("a", "b"), Doors()]
    scheduler = make_scheduler(*doors)
    for name in "abc":
        scheduler.add(make_request(name, [1]))
    assert enter(scheduler) == ["c"]
    doors[1].closed.clear()
    scheduler.wake()
    assert enter(scheduler) == ["b"]
    doors[0].closed.clear()
    assert enter(scheduler) == []  # gates are asked again when they say so
    scheduler.wake()
    assert enter(scheduler) == ["a"]


def test_there_is_no_work_while_all_requests_wait_at_gates() -> None:
    doors = Doors("a")
    scheduler = make_scheduler(doors)
    assert (scheduler.has_work, scheduler.has_unfinished) == (False, False)
    scheduler.add(make_request("a", [1, 2], max_tokens=1))
    assert scheduler.has_work  # the gates have not been asked yet
    assert enter(scheduler) == []
    assert (scheduler.has_work, scheduler.has_unfinished) == (False, True)
    scheduler.add(make_request("b", [1, 2], max_tokens=1))
    assert scheduler.has_work
    assert enter(scheduler) == ["b"]
    assert enter(scheduler) == []
    assert (scheduler.has_work, scheduler.has_unfinished) == (False, True)
    doors.closed.clear()
    scheduler.wake()
    assert scheduler.has_work
    assert enter(scheduler) == ["a"]
    assert (scheduler.has_work, scheduler.has_unfinished) == (False, False)


def test_a_request_that_a_gate_refuses_fails_with_its_reason() -> None:
    doors = Doors("bad")
    scheduler = make_scheduler(doors)
    scheduler.add(make_request("bad", [1, 2]))
    assert enter(scheduler) == []
    doors.broken.add("bad")
    scheduler.wake()
    (output,) = scheduler.open_gates()
    assert (output.request_id, output.finish_reason) == ("bad", FinishReason.BAD_REQUEST)
    assert output.stop_reason == "the grammar has no end"
    assert not scheduler.has_unfinished


def test_a_request_for_which_a_gate_has_no_time_fails_as_overloaded() -> None:
    doors = Doors("late")
    scheduler = make_scheduler(doors)
    scheduler.add(make_request("late", [1, 2]))
    assert enter(scheduler) == []
    doors.busy |= {"late", "now"}
    scheduler.add(make_request("now", [1, 2]))
    outputs = scheduler.open_gates()
    assert {(o.request_id, o.finish_reason, o.stop_reason) for o in outputs} == {
        (name, FinishReason.OVERLOADED, "other requests took the time") for name in ("late", "now")
    }
    assert not scheduler.has_unfinished


def test_a_request_can_be_aborted_while_it_waits_at_a_gate() -> None:
    scheduler = make_scheduler(Doors("a"))
    scheduler.add(make_request("a", [1, 2]))
    assert enter(scheduler) == []
    assert scheduler.abort("a")
    assert not scheduler.has_unfinished
    scheduler.wake()
    assert enter(scheduler) == []


def test_a_preempted_request_passes_the_gates_again() -> None:
    doors = Doors()
    scheduler = make_scheduler(doors, num_blocks=1 + 4, max_model_len=16)
    scheduler.add(make_request("first", [1, 2, 3, 4, 5, 6, 7]))
    scheduler.add(make_request("last", [11, 12, 13, 14, 15, 16, 17]))
    assert enter(scheduler) == ["first", "last"]
    doors.closed.add("last")
    for _ in range(2):
        scheduler.open_gates()
        answer(scheduler, step := scheduler.schedule(), *[9] * len(step.rows))
    scheduler.open_gates()
    assert scheduler.requests["last"].status is Status.GATED
    assert counts(scheduler, step) == {"first": 1}
