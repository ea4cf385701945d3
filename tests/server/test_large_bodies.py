"""Bodies that are large, or made of very many small things: what is refused, what is counted, what is given back."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.server import bodies
from support.server import Host, Service, eventually
from support.waiting import LONGEST

LONG = "word " * 400_000
SHORT = {"prompt": "a", "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def small(host: Host) -> Service:
    """It holds a megabyte in all."""
    return host.serve(max_body_bytes=1_000_000, max_total_body_bytes=1_000_000)


@contextmanager
def unfinished(server: Service, head: str, body: bytes) -> Iterator[socket.socket]:
    """A request whose body does not end."""
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", head, "", ""]
        raw.sendall("\r\n".join(lines).encode() + body)
        raw.settimeout(LONGEST)
        yield raw


def in_hand(server: Service) -> int:
    """The bytes of the bodies in hand. A request that asked instead would itself be a body in hand."""
    layer = server.app.middleware_stack
    while layer is not None and not isinstance(layer, bodies.BodyLimit):
        layer = layer.app
    return 0 if layer is None else layer.in_hand  # there are no layers before the first request


# ---- prompts that cannot fit


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["a", LONG]}),
        ("/v1/completions", {"prompt": [5] * 200_000}),
        ("/v1/completions", {"prompt": [[5], [5] * 200_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 20_000}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(type(part).__name__ for part in value.values()),
)
def test_what_cannot_fit_is_refused_with_its_length(server, path, body):
    answer = server.post(path, body)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["param"] == next(iter(body))
    assert "max_model_len is 2048" in answer.error["message"]


def test_a_prompt_that_may_be_truncated_can_have_any_length(server):
    [choice] = server.complete(LONG, max_tokens=1, truncate_prompt_tokens=10, echo=True)["choices"]
    assert choice["text"].startswith(" word")
    assert server.complete([5] * 200_000, max_tokens=1, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 2047
    chat = server.chat(LONG, max_tokens=1, truncate_prompt_tokens=10, return_prompt_text=True)
    assert len(chat["prompt_text"]) > len(LONG)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x"] * 1025),
        ("bad_words", ["x"] * 1025),
        ("logit_bias", {str(i): 1 for i in range(5000)}),
        ("allowed_token_ids", [5] * 5000),
        ("stop_token_ids", [5] * 5000),
    ],
)
def test_lists_that_would_slow_every_token_down_are_refused(server, field, value):
    answer = server.post("/v1/completions", {**SHORT, field: value})
    assert (answer.status, answer.error["param"]) == (400, field)
    assert f"has {len(value)} entries" in answer.error["message"]


def test_a_long_cache_salt_is_no_burden(server):
    assert server.complete("word " * 1000, max_tokens=1, cache_salt="x" * 1_000_000)["usage"]["completion_tokens"] == 1


# ---- how much is in hand


def test_bodies_beyond_the_total_are_refused_before_they_are_read(small):
    with unfinished(small, "Content-Length: 900001", b"x" * 900_000):
        eventually(lambda: in_hand(small) == 900_000)
        assert small.post("/v1/completions", {"prompt": "x" * 200_000}).status == 503
        with unfinished(small, "Content-Length: 200000", b"") as raw, raw.makefile("rb") as stream:
            head = b"".join(iter(stream.readline, b"\r\n")).decode()
            error = json.loads(stream.read(int(re.search(r"content-length: (\d+)", head)[1])))["error"]
        assert head.startswith("HTTP/1.1 503 ")
        assert "\r\nretry-after: 1\r\n" in head.lower()
        assert error["code"] == "server_overloaded"
        assert small.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1  # small ones find room
    eventually(lambda: small.post("/v1/completions", {"prompt": "x" * 200_000}).status == 400)


def test_a_body_of_unknown_length_counts_as_it_comes(small):
    chunk = b"%x\r\n%s\r\n" % (300_000, b"x" * 300_000)
    with unfinished(small, "Transfer-Encoding: chunked", 2 * chunk):
        eventually(lambda: in_hand(small) == 600_000)
        assert small.post("/v1/completions", {"prompt": "x" * 600_000}).status == 503
        with unfinished(small, "Transfer-Encoding: chunked", 2 * chunk) as raw:
            assert raw.recv(10_000).startswith(b"HTTP/1.1 503 ")
    eventually(lambda: small.post("/v1/completions", {"prompt": "x" * 900_000}).status == 400)


@pytest.mark.slow
def test_a_body_is_not_in_hand_while_it_is_answered(small, host: Host):
    body = {**SHORT, "prompt": "x " * 450_000, "truncate_prompt_tokens": 5}
    with small.connection("/v1/completions", {**body, "max_tokens": 2040, "ignore_eos": True, "stream": True}) as raw:
        assert raw.recv(10_000).startswith(b"HTTP/1.1 200")
        assert small.post("/v1/completions", body).status == 200
        assert small.get("/load").json == {"server_load": 1}
    eventually(lambda: host.is_idle)


def test_every_end_of_a_request_gives_its_share_back(small):
    for text in ("x" * 900_000, '{"prompt": ' + "[" * 900_000, '"' + "x" * 900_000 + '"'):
        for _ in range(3):
            answer = small.request("POST", "/v1/completions", text.encode(), Content_Type="application/json")
            assert answer.status == 400
            assert small.request("POST", "/v1/completions", text.encode(), Origin="https://a.example").status == 403
    assert small.post("/v1/completions", {**SHORT, "prompt": "x" * 900_000, "truncate_prompt_tokens": 5}).status == 200


def test_a_body_that_stops_coming_is_given_up(small, host: Host):
    with unfinished(host.serve(body_timeout=0.2), "Content-Length: 900000", b"{") as raw:
        assert raw.recv(10_000).startswith(b"HTTP/1.1 408 ")
    assert small.post("/v1/completions", {**SHORT, "prompt": "x" * 900_000, "truncate_prompt_tokens": 5}).status == 200
