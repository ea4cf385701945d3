"""What a client can do before it has shown an API key: heads that are endless, countless or never complete."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from hypothesis import HealthCheck, given, settings

from quire.config.engine import ConfigError, ServerConfig
from quire.server.warning_limit import WarningLimit
from support.attack_variants import heads
from support.attacks import Witness, steady_memory, witness_of
from support.edge import EdgeHost, answered, send_until_closed, until_closed
from support.waiting import eventually

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
MOST = 64 << 10
PARSERS = ["httptools", "h11"]


@pytest.fixture(scope="module", params=PARSERS)
def edge(request: pytest.FixtureRequest) -> Iterator[EdgeHost]:
    """With the default limits, but for those of time."""
    host = EdgeHost(request.param, header_timeout=600, timeout_keep_alive=600)
    yield from steady(host)
    host.close()


@pytest.fixture(scope="module", params=PARSERS)
def hasty(request: pytest.FixtureRequest) -> Iterator[EdgeHost]:
    """With short times."""
    host = EdgeHost(request.param, header_timeout=0.3, timeout_keep_alive=0.3)
    yield from steady(host)
    host.close()


def steady(host: EdgeHost) -> Iterator[EdgeHost]:
    """Used by tests that must leave no memory behind."""

    def usual() -> None:
        with host.connection(GET + b"Connection: close\r\n\r\n") as raw:
            assert answered(raw) == (200, b"ok")

    with steady_memory(usual):
        yield host


def edge_witness(edge: EdgeHost) -> AbstractContextManager[Witness]:
    """A second client, which reads streams."""
    return witness_of(lambda: edge.connection(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"))


def answer_to(edge: EdgeHost, data: bytes) -> bytes:
    """The answer to data after which the server closes the connection."""
    with edge.connection() as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(data)
        return until_closed(raw)


# ---- sizes


@pytest.mark.parametrize(
    "piece",
    [b"x" * 4096, b"a: b\r\n" * 700, b"a: " + b"b" * 1000 + b"\r\n"],
    ids=["one endless header", "short headers", "long headers"],
)
@pytest.mark.parametrize("begin", [b"GET /", GET, GET + b"X-Long: "], ids=["in the URL", "in a name", "in a value"])
def test_an_endless_head_is_refused_when_it_exceeds_the_limit(edge: EdgeHost, begin, piece):
    with edge_witness(edge), edge.connection(begin) as raw:
        sent = send_until_closed(raw, piece, 64 << 20)
        answer = until_closed(raw)
    assert sent < 16 << 20  # what the buffers of both sides hold
    assert not answer or answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    eventually(lambda: edge.connections == 0)


def test_a_head_is_refused_with_the_limits_that_would_be_allowed(edge: EdgeHost):
    large = GET + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 4000) for i in range(20)) + b"\r\n"
    many = GET + b"".join(b"X-%d: a\r\n" % i for i in range(101)) + b"\r\n"
    with edge_witness(edge):
        for data in (large, many):
            answer = answer_to(edge, data)
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert b"65536 bytes and 100 headers at most" in answer
            assert b'"headers_too_large"' in answer


def test_a_head_just_below_the_limits_is_accepted(edge: EdgeHost):
    for data in (
        GET + b"".join(b"X-%d: a\r\n" % i for i in range(99)) + b"\r\n",
        GET + b"X-Long: " + b"a" * 60_000 + b"\r\n\r\n",
    ):
        with edge.connection(data) as raw:
            assert raw.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_headers_behind_the_body_count_too(edge: EdgeHost):
    head = b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    with edge_witness(edge), edge.connection(head) as raw:
        send_until_closed(raw, b"a: b\r\n" * 1000, 16 << 20)
        assert not until_closed(raw).startswith(b"HTTP/1.1 200")
    eventually(lambda: edge.connections == 0)


def test_an_endless_extension_of_a_chunk_is_refused(edge: EdgeHost):
    head = b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;"
    with edge_witness(edge), edge.connection(head) as raw:
        assert send_until_closed(raw, b"x" * 65536, 64 << 20) < 16 << 20
    eventually(lambda: edge.connections == 0)


def test_a_long_body_is_not_a_head(edge: EdgeHost):
    size = 4 << 20
    with edge.connection(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size) as raw:
        assert answered(raw) == (200, b"%d" % size)
    pieces = b"1000\r\n" + b"y" * 4096 + b"\r\n"
    head = b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with edge.connection(head + 1024 * pieces + b"0\r\n\r\n") as raw:
        assert answered(raw) == (200, b"%d" % size)


def test_many_requests_of_a_connection_are_counted_one_by_one(edge: EdgeHost):
    with edge.connection() as raw, raw.makefile("rb") as stream:
        for _ in range(8):
            raw.sendall(GET + b"X-Long: " + b"a" * 10_000 + b"\r\n\r\n")
            head = b"".join(iter(stream.readline, b"\r\n"))
            assert head.startswith(b"HTTP/1.1 200 ")
            assert stream.read(2) == b"ok"


def test_what_is_no_http_gets_an_error_in_the_usual_shape(edge: EdgeHost):
    answer = answer_to(edge, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"error"' in answer


# ---- times


def test_half_sent_heads_are_closed(hasty: EdgeHost):
    halves = [b"", b"G", b"GET /", GET, GET + b"X-", GET + b"X-Half: a", b"\r\n\r\n"]
    with edge_witness(hasty), contextlib.ExitStack() as stack:
        raws = [(half, stack.enter_context(hasty.connection(half))) for half in halves * 15]
        for half, raw in raws:
            answer = until_closed(raw)
            assert answer.startswith(b"HTTP/1.1 408 ") == (half.startswith(b"G")), half
    eventually(lambda: hasty.connections == 0)


def test_a_head_that_comes_byte_by_byte_has_no_more_time(hasty: EdgeHost):
    with edge_witness(hasty), hasty.connection(GET) as raw:
        raw.settimeout(0.05)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while not answer:
                raw.sendall(b"a")
                with contextlib.suppress(TimeoutError):
                    answer = raw.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed(hasty: EdgeHost):
    with hasty.connection(GET + b"\r\n") as raw:
        answer = until_closed(raw)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"ok")


def test_a_body_that_nobody_reads_does_not_keep_a_connection(hasty: EdgeHost):
    """As one that comes behind a 401."""
    for head in (b"Content-Length: 1000000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
        with edge_witness(hasty), hasty.connection(POST + head) as raw:
            raw.settimeout(0.05)
            closed = False
            while not closed:  # a client that sends all the time
                try:
                    raw.sendall(b"5\r\nabcde\r\n")
                    closed = raw.recv(1000) == b""
                except TimeoutError:
                    pass
                except ConnectionError:
                    closed = True
    eventually(lambda: hasty.connections == 0)


def test_a_request_that_is_answered_has_all_the_time(hasty: EdgeHost):
    with hasty.connection(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n") as raw, hasty.connection(GET) as other:
        assert until_closed(other).startswith(b"HTTP/1.1 408 ")  # so long it was
        hasty.let_go()
        assert raw.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_refused_connection_ends_even_if_its_client_reads_and_closes_nothing(hasty: EdgeHost):
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.connect(("127.0.0.1", hasty.port))
        raw.sendall(GET)
        eventually(lambda: hasty.connections == 1)
        eventually(lambda: hasty.connections == 0)


# ---- generated


def check_that_nothing_stays(hasty: EdgeHost, head: bytes) -> None:
    with hasty.connection() as raw:
        with contextlib.suppress(OSError):
            raw.sendall(head)
            raw.shutdown(socket.SHUT_WR)
        until_closed(raw)
    with hasty.connection(GET + b"\r\n") as raw:
        assert answered(raw) == (200, b"ok")
    eventually(lambda: hasty.connections <= 2)  # that of the last request, and of the second client


@pytest.mark.parametrize("count", [15, pytest.param(2000, marks=pytest.mark.nightly)])
def test_no_beginning_of_a_connection_stays_or_harms_others(hasty: EdgeHost, count: int):
    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(head=heads(b"/read"))
    def check(head: bytes) -> None:
        check_that_nothing_stays(hasty, head)

    with edge_witness(hasty):
        check()
    eventually(lambda: hasty.connections == 0)


# ---- options


@pytest.mark.parametrize(
    "wrong",
    [
        {"h11_max_incomplete_event_size": 1},
        {"h11_max_header_count": 0},
        {"timeout_keep_alive": 0},
        {"header_timeout": -1},
        {"body_timeout": 0},
        {"sse_keep_alive_interval": -1},
    ],
)
def test_limits_without_sense_are_refused(wrong):
    [name] = wrong
    with pytest.raises(ConfigError, match=name):
        ServerConfig.create(**wrong)


# ---- the log


def test_requests_that_are_no_http_do_not_flood_the_log(edge: EdgeHost, monkeypatch):
    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "filters", [WarningLimit(0.5)])
    logger.addHandler(handler)
    try:
        for _ in range(50):
            assert answer_to(edge, b"\x16\x03\x01 no HTTP\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        eventually(lambda: sum(map(_count, lines)) == 50, lambda: lines)
    finally:
        logger.removeHandler(handler)
    assert lines[0] == "Invalid HTTP request received."
    assert len(lines) < 50


def _count(line: str) -> int:
    """How often the warning came that a line is about; 0 for lines about something else."""
    if not line.startswith("Invalid HTTP request received."):
        return 0
    found = re.search(r"\((\d+) more in the last", line)
    return 1 if found is None else int(found[1])


def test_a_server_limits_how_often_it_warns(edge: EdgeHost):
    assert any(isinstance(each, WarningLimit) for each in logging.getLogger("uvicorn.error").filters)
