"""Which core gets a request."""

from __future__ import annotations

from collections import Counter

from quire.engine.router import Router


def send(router: Router, count: int, ready: list[int]) -> list[int]:
    """The cores of `count` requests, of which no core reports anything."""
    chosen = []
    for _ in range(count):
        chosen.append(router.choose(ready))
        router.sent(chosen[-1])
    return chosen


def test_requests_on_their_way_count_so_a_burst_is_spread_evenly():
    assert Counter(send(Router(4), 40, [0, 1, 2, 3])) == {0: 10, 1: 10, 2: 10, 3: 10}


def test_a_waiting_request_counts_as_four_running_ones():
    router = Router(2)
    router.report(0, waiting=1, running=0, received=0)
    router.report(1, waiting=0, running=3, received=0)
    assert router.choose([0, 1]) == 1
    router.report(1, waiting=0, running=5, received=0)
    assert router.choose([0, 1]) == 0


def test_a_request_counts_until_the_core_has_reported_it_as_received():
    router = Router(2)
    router.report(1, waiting=0, running=2, received=0)
    assert send(router, 1, [0, 1]) == [0]
    router.report(0, waiting=0, running=0, received=0)  # it was sent before the request arrived
    assert router.choose([0, 1]) == 1
    router.report(0, waiting=0, running=1, received=1)
    assert router.choose([0, 1]) == 0


def test_cores_with_equal_loads_take_turns():
    router = Router(3)
    chosen = []
    for received in range(1, 7):  # each request has ended before the next
        [core] = send(router, 1, [0, 1, 2])
        chosen.append(core)
        router.report(core, waiting=0, running=0, received=-(-received // 3))
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_only_ready_cores_are_chosen_and_a_new_core_begins_empty():
    router = Router(3)
    send(router, 9, [0, 1, 2])
    assert set(send(router, 4, [0, 2])) == {0, 2}
    router.forget(1)
    assert send(router, 3, [0, 1, 2]) == [1, 1, 1]
