"""Which server gets a request."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quire.config.engine import ConfigError
from quire.router.call import MAX_PIECES, PIECE, Call, text_pieces
from quire.router.config import PrefillServer, RouteConfig
from quire.router.fleet import Backend, Fleet, Visit
from quire.router.metrics import RouteMetrics

URLS = tuple(f"http://10.0.0.{number}:8000" for number in range(1, 5))


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def fleet(**options: Any) -> Fleet:
    fleet = Fleet(RouteConfig(URLS, **options), RouteMetrics())
    for backend in fleet.backends:
        fleet.join(backend)
    return fleet


def call(body: Any = None, session: bytes | None = None) -> Call:
    call = Call("POST", "/v1/chat/completions", [], json.dumps(body or {}).encode(), "id")
    call.session = session
    return call


def conversation(*texts: str, **fields: Any) -> Call:
    return call({**fields, "messages": [{"role": "user", "content": text} for text in texts]})


async def visit(fleet: Fleet, call: Call, answered: bool = True) -> tuple[Backend, Visit]:
    """Send a request that does not end."""
    backend = fleet.choose(call, ())
    assert backend is not None
    visit = await Visit(fleet, backend).__aenter__()
    if answered:
        visit.answered()
    return backend, visit


@in_a_loop
async def test_each_in_turn():
    servers = fleet(policy="round-robin")
    chosen = [(await visit(servers, call()))[0].number for _ in range(8)]
    assert chosen == [0, 1, 2, 3] * 2
    servers.leave(servers.backends[1], "a test")
    chosen = [(await visit(servers, call()))[0].number for _ in range(6)]
    assert chosen == [0, 2, 3] * 2


@in_a_loop
async def test_requests_without_an_answer_weigh_more_than_those_being_answered():
    servers = fleet()
    for backend in servers.backends[1:]:
        backend.elsewhere = 100
        servers.report(backend)
    for _ in range(24):
        await visit(servers, call())
    servers.backends[1].elsewhere = 20  # fewer than the 24 that the first one is answering
    servers.report(servers.backends[1])
    chosen = [(await visit(servers, call(), answered=False))[0].number for _ in range(3)]
    assert chosen == [1, 0, 1]  # 20 against 24, 24 against 24 (whose turn it is), 24 against 28


@in_a_loop
async def test_the_load_is_gone_when_visits_have_ended():
    servers = fleet()
    for answered in (True, False):
        visits = [await visit(servers, call(), answered) for _ in range(8)]
        assert [backend.in_flight for backend in servers.backends] == [2] * 4
        for _, one in visits:
            await one.__aexit__(None, None, None)
        assert [backend.in_flight for backend in servers.backends] == [0] * 4


@in_a_loop
async def test_a_conversation_goes_on_where_it_began_unless_others_are_far_less_busy():
    servers = fleet(policy="prefix")
    first, second = "Once upon a time " * 40, "There was a king " * 40
    homes = [(await visit(servers, conversation(text)))[0] for text in (first, second)]
    assert homes[0] != homes[1]
    for home, text in zip(homes, (first, second), strict=True):
        for turns in range(1, 4):
            longer = conversation(text, *["And then? " * 30] * turns, temperature=turns)
            assert (await visit(servers, longer))[0] is home
    chosen = Counter([(await visit(servers, conversation(first)))[0].number for _ in range(200)])
    assert max(chosen.values()) < 80


def test_texts_of_different_models_and_salts_and_tools_share_nothing():
    text = "Once upon a time " * 40
    bodies = [{}, {"model": "a"}, {"model": "b"}, {"cache_salt": "a"}, {"tools": [{"type": "function"}]}]
    assert len({text_pieces(conversation(text, **body))[0] for body in bodies}) == len(bodies)
    assert text_pieces(conversation(text, temperature=1, user="a")) == text_pieces(conversation(text))


def test_pieces_of_all_apis_and_of_what_is_no_text():
    text = "Once upon a time " * 40
    for field in ("prompt", "input", "messages"):
        assert len(text_pieces(call({field: text}))) == (len(text) + 2) // PIECE
    assert text_pieces(call({"prompt": list(range(1000))}))
    for body in (b"", b"{", b"[1]", b'{"prompt"', b'{"prompt": "\xff"}', b"--boundary\r\n" * 100):
        assert text_pieces(Call("POST", "/", [], body, "id")) == []
    assert len(text_pieces(call({"prompt": "a" * (2 << 20)}))) == MAX_PIECES


@in_a_loop
async def test_sessions_are_spread_and_only_those_of_a_lost_server_move():
    servers = fleet()
    sessions = [str(number).encode() for number in range(400)]

    def homes() -> dict[bytes, Backend | None]:
        return {session: servers.choose(call(session=session), ()) for session in sessions}

    before = homes()
    assert all(60 < count < 140 for count in Counter(before.values()).values())
    lost = servers.backends[2]
    servers.leave(lost, "a test")
    during = homes()
    assert all(during[session] is before[session] for session in sessions if before[session] is not lost)
    assert len({during[session] for session in sessions if before[session] is lost}) == 3
    servers.join(lost)
    assert homes() == before


@in_a_loop
async def test_a_server_that_is_given_up_lets_go_what_it_has_not_answered():
    servers = fleet()
    for backend in servers.backends[1:]:
        servers.leave(backend, "a test")
    begun = asyncio.Event()

    async def wait(answered: bool) -> None:
        async with Visit(servers, servers.backends[0]) as one:
            if answered:
                one.answered()
            await begun.wait()

    tasks = [asyncio.create_task(wait(answered)) for answered in (True, False)]
    await asyncio.sleep(0)
    servers.leave(servers.backends[0], "a test")
    servers.give_up(servers.backends[0])
    with pytest.raises(TimeoutError):
        await tasks[1]
    assert servers.choose(call(), ()) is None
    begun.set()
    await tasks[0]
    servers.join(servers.backends[0])
    servers.join(servers.backends[1])
    chosen = Counter([(await visit(servers, call()))[0].number for _ in range(10)])
    assert chosen == {0: 5, 1: 5}


@in_a_loop
async def test_full_servers_get_nothing():
    servers = fleet(max_connections=2)
    for _ in range(8):
        await visit(servers, call(session=b"a"))
    assert [backend.in_flight for backend in servers.backends] == [2] * 4
    assert servers.choose(call(), ()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": ("10.0.0.1:8000",)}, "URL such as"),
        ({"backend": ("ftp://a",)}, "URL such as"),
        ({"backend": ("http://a:b",)}, "URL such as"),
        ({"backend": ("http://a?b",)}, "URL such as"),
        ({"backend": ("http://a/", "http://a")}, "twice"),
        ({"backend": ()}, "at least one"),
        ({"backend": ("http://a",), "max_retries": -1}, "max_retries"),
        ({"backend": ("http://a",), "health_check_interval": 0}, "health_check_interval"),
    ],
)
def test_options_that_cannot_be_used_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        RouteConfig(**options)


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("http://a:8001", ("http://a:8001", "a", 14579)),
        ("http://a:8001/x/=10.0.0.1:5", ("http://a:8001/x", "10.0.0.1", 5)),
        ("https://a=[::1]:5", ("https://a", "::1", 5)),
        ("http://[::1]:8=b", ("http://[::1]:8", "b", 14579)),
    ],
)
def test_prefill_servers_as_they_are_named(text, server):
    assert PrefillServer.read(text) == PrefillServer(*server)


@pytest.mark.parametrize("text", ["a", "http://a=b:c", "http://a=b:0", "http://a=:5", "http://a=b/c", "http://a=u@b:5"])
def test_prefill_servers_that_cannot_be_used_are_named(text):
    with pytest.raises(ConfigError, match="prefill"):
        RouteConfig(("http://b",), prefill=(text,))


def test_a_server_is_named_once():
    for prefill in (("http://a",), ("http://b", "http://b/")):
        with pytest.raises(ConfigError, match="twice"):
            RouteConfig(("http://a",), prefill=prefill)
    with pytest.raises(ConfigError, match="prefill_min_bytes"):
        RouteConfig(("http://a",), prefill_min_bytes=-1)
