"""How many drafts are verified: as many as make the engine faster."""

from __future__ import annotations

from quire.messages.step import StepCosts
from quire.speculation.lengths import Acceptance, DraftLengths

MEMORY_BOUND = StepCosts({1: 1.0, 64: 1.0, 128: 2.0, 256: 4.0})
ARITHMETIC_BOUND = StepCosts({1: 1.0, 2: 2.0, 4: 4.0})


def acceptance(value: float) -> Acceptance:
    made = Acceptance()
    made.value = value
    return made


def test_steps_that_take_no_longer_get_all_drafts():
    lengths = DraftLengths(5, MEMORY_BOUND)
    assert lengths(1, acceptance(0.9)) == 5
    assert lengths(1, acceptance(0.3)) > 0


def test_steps_that_take_longer_with_each_token_get_none():
    assert DraftLengths(5, ARITHMETIC_BOUND)(1, acceptance(0.95)) == 0
    assert DraftLengths(5, MEMORY_BOUND)(64, acceptance(0.7)) == 0
    assert DraftLengths(5, MEMORY_BOUND)(1000, acceptance(0.9)) == 0


def test_a_batch_gets_as_many_drafts_as_there_is_room_for():
    lengths = DraftLengths(7, MEMORY_BOUND)
    counts = [lengths(requests, acceptance(0.8)) for requests in (1, 8, 12, 16, 24, 32, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 7
    assert counts[3] == 3


def test_requests_whose_drafts_fail_get_fewer_and_later_another_chance():
    lengths, request = DraftLengths(6, StepCosts({1: 1.0, 2: 1.05, 4: 1.2, 8: 1.5, 16: 3.0})), Acceptance()
    first = lengths(1, request)
    for _ in range(40):
        request.verified(3, 0)
    assert lengths(1, request) == 0 < first
    for _ in range(200):
        request.recover()
    assert lengths(1, request) > 0


def test_the_time_to_make_drafts_counts():
    """A draft that takes half as long as a step is worth it if it is nearly always right, and further ones are not."""
    steps = {1: 1.0, 16: 1.0}
    assert DraftLengths(5, StepCosts(steps, {1: 0.2}, {1: 0.2}))(1, acceptance(0.95)) == 5
    assert DraftLengths(5, StepCosts(steps, {1: 0.5}, {1: 2.0}))(1, acceptance(0.95)) == 1
    assert DraftLengths(5, StepCosts(steps, {1: 2.0}, {1: 2.0}))(1, acceptance(0.95)) == 0
