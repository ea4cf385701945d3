"""Which core gets a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.engine import router as module
from quire.engine.router import PIECE, Router, token_pieces
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams


def request(tokens: Sequence[int] = (), salt: str | None = None) -> EngineCoreRequest:
    return EngineCoreRequest("a", list(tokens), SamplingParams(), 0, 1, cache_salt=salt)


def send(router: Router, count: int, ready: list[int]) -> list[int]:
    """The cores of `count` requests, of which no core reports anything."""
    return [router.route(request(), ready) for _ in range(count)]


def test_requests_on_their_way_count_so_a_burst_is_spread_evenly():
    assert Counter(send(Router(4), 40, [0, 1, 2, 3])) == {0: 10, 1: 10, 2: 10, 3: 10}


def test_a_waiting_request_counts_as_four_running_ones():
    router = Router(2)
    router.report(0, waiting=1, running=0, received=0)
    router.report(1, waiting=0, running=3, received=0)
    assert send(router, 1, [0, 1]) == [1]
    router.report(1, waiting=0, running=5, received=1)
    assert send(router, 1, [0, 1]) == [0]


def test_a_request_counts_until_the_core_has_reported_it_as_received():
    router = Router(2)
    router.report(1, waiting=0, running=2, received=0)
    assert send(router, 1, [0, 1]) == [0]
    router.report(0, waiting=0, running=0, received=0)  # it was sent before the request arrived
    assert send(router, 1, [0, 1]) == [1]
    router.report(0, waiting=0, running=1, received=1)
    assert send(router, 1, [0, 1]) == [0]


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


# ---- by prefix


def settled(router: Router, cores: int) -> None:
    """All that was sent has ended."""
    for core in range(cores):
        router.report(core, waiting=0, running=0, received=router._cores[core].sent)


def test_a_prompt_goes_where_the_longest_part_of_it_went_before():
    router = Router(3, pieces=token_pieces)
    head, other = list(range(2 * PIECE)), list(range(1000, 1000 + PIECE))
    first = router.route(request(head), [0, 1, 2])
    settled(router, 3)
    second = router.route(request(head[:PIECE] + other), [rank for rank in (0, 1, 2) if rank != first])
    settled(router, 3)
    assert second != first
    for _ in range(3):
        assert router.route(request(head + other), [0, 1, 2]) == first
        assert router.route(request(head[:PIECE] + other + head), [0, 1, 2]) == second
        settled(router, 3)


def test_prompts_that_share_less_than_a_piece_or_have_another_salt_take_turns():
    router = Router(2, pieces=token_pieces)
    for prompts in (
        [request(range(PIECE - 1))] * 4,
        [request(range(PIECE), salt=str(index)) for index in range(4)],
        [request(range(index, index + PIECE)) for index in range(4)],
    ):
        chosen = []
        for prompt in prompts:
            chosen.append(router.route(prompt, [0, 1]))
            settled(router, 2)
        assert Counter(chosen) == {0: 2, 1: 2}


def test_a_prefix_does_not_overload_its_core():
    router, prompt = Router(4, pieces=token_pieces), request(range(4 * PIECE))
    chosen = Counter(router.route(prompt, [0, 1, 2, 3]) for _ in range(400))
    assert len(chosen) == 4
    assert max(chosen.values()) < 1.5 * 100


def test_a_lost_core_has_no_prefixes_and_old_ones_are_forgotten(monkeypatch):
    router, prompt = Router(2, pieces=token_pieces), request(range(4 * PIECE))
    core = router.route(prompt, [0, 1])
    settled(router, 2)
    router.forget(core)
    assert router._prefixes.longest(token_pieces(prompt), [0, 1]) == [0, 1]
    monkeypatch.setattr(module, "MAX_PIECES", 4)
    router.route(prompt, [0, 1], core=1)
    router.route(request(range(PIECE, 3 * PIECE)), [0, 1], core=0)
    assert len(router._prefixes._cores) == 4
    assert router._prefixes.longest(token_pieces(prompt), [0, 1]) == [1]  # its head is still known
