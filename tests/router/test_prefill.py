"""`quire route --prefill`: one server computes the prompt of a request, another one answers it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest

from support.route import Proxy, Received, SimulatedGpu, stand_ins
from support.server import eventually
from support.waiting import LONGEST

PROMPT = "Once upon a time " * 80
BODY = {"prompt": PROMPT, "max_tokens": 5}
PARAMS = "kv_transfer_params"
PORT = 14579


@pytest.fixture(scope="module")
def servers() -> Iterator[list[SimulatedGpu]]:
    """Two that answer, and two that compute prompts."""
    with stand_ins(4) as servers:
        yield servers


@pytest.fixture(scope="module")
def proxy(servers: list[SimulatedGpu]) -> Iterator[Proxy]:
    *decoders, first, second = servers
    options = ("--prefill", f"{first.url}=10.0.0.9:7000", "--prefill-url", second.url)
    with Proxy(*(server.url for server in decoders), options=options) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _all_answer(servers: list[SimulatedGpu], proxy: Proxy) -> Iterator[None]:
    yield
    for server in servers:
        server.received.clear()
        server.health = 200
        server.reply = lambda handler: handler.send(handler.server.url.encode())
    proxy.wait_for_backends(4)


def received(servers: list[SimulatedGpu]) -> list[Received]:
    return [request for server in servers for request in server.received]


def decodes(servers: list[SimulatedGpu]) -> list[Received]:
    return received(servers[:2])


def prefills(servers: list[SimulatedGpu]) -> list[Received]:
    return received(servers[2:])


def all_reply(servers: list[SimulatedGpu], reply: Any) -> None:
    for server in servers:
        server.reply = reply


def params_of(request: Received) -> Any:
    return json.loads(request.body).get(PARAMS)


def hold(servers: list[SimulatedGpu]) -> tuple[threading.Semaphore, threading.Event]:
    """Let servers answer nothing. The first tells of requests that arrive, the second of one whose client left."""
    arrived, left = threading.Semaphore(0), threading.Event()

    def wait(handler: Any) -> None:
        arrived.release()
        if handler.connection.recv(1) == b"":
            left.set()
        handler.cut()

    all_reply(servers, wait)
    return arrived, left


def meet(servers: list[SimulatedGpu]) -> None:
    """Let both servers of each request wait for each other, and then answer with their names."""
    both = threading.Barrier(2)
    all_reply(servers, lambda h: (both.wait(LONGEST), h.send(h.server.url.encode())))


# ---- the two requests


@pytest.mark.parametrize(
    ("path", "given", "prefill"),
    [
        (
            "/v1/completions",
            {
                "prompt": PROMPT,
                "max_tokens": 500,
                "min_tokens": 9,
                "n": 2,
                "best_of": 2,
                "stream": True,
                "stop": "x",
                "stream_options": {"include_usage": True},
                "logprobs": 3,
                "cache_salt": "s",
                "guided_json": {},
                "structured_outputs": {"regex": "a"},
                "temperature": 0.1,
                PARAMS: {"remote_host": "1.2.3.4"},
            },
            {"prompt": PROMPT, "max_tokens": 1, "stop": "x", "cache_salt": "s", "temperature": 0.1},
        ),
        (
            "/v1/chat/completions?a=b",
            {
                "model": "m",
                "messages": [{"role": "user", "content": PROMPT}],
                "tools": [{"type": "function"}],
                "tool_choice": "auto",
                "response_format": {"type": "json_object"},
                "max_completion_tokens": 50,
                "logprobs": True,
                "top_logprobs": 2,
                "prompt_logprobs": None,
                "seed": 12345678901234567890,
            },
            {
                "model": "m",
                "messages": [{"role": "user", "content": PROMPT}],
                "tools": [{"type": "function"}],
                "tool_choice": "auto",
                "max_tokens": 1,
                "max_completion_tokens": 1,
                "prompt_logprobs": None,
                "seed": 12345678901234567890,
            },
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "system": "s", "messages": [{"role": "user", "content": PROMPT}], "stream": True},
            {"max_tokens": 1, "system": "s", "messages": [{"role": "user", "content": PROMPT}]},
        ),
        (
            "/v1/responses",
            {
                "input": PROMPT,
                "instructions": "i",
                "max_output_tokens": 99,
                "text": {"format": {"type": "text"}},
                "include": ["message.output_text.logprobs"],
                "previous_response_id": None,
                "background": False,
            },
            {
                "input": PROMPT,
                "instructions": "i",
                "max_output_tokens": 1,
                "store": False,
                "previous_response_id": None,
                "background": False,
            },
        ),
    ],
)
def test_a_prefill_server_computes_the_prompt_while_another_answers(
    proxy: Proxy, servers: list[SimulatedGpu], path, given, prefill
):
    meet(servers)
    answer = proxy.post(path, given, X_Request_Id="mine", Authorization="Bearer key", OpenAI_Organization="o")
    [decoded], [prefilled] = decodes(servers), prefills(servers)
    assert answer.body.decode() == next(server.url for server in servers if decoded in server.received)
    computing = servers[2] if servers[2].received else servers[3]
    host, port = ("10.0.0.9", 7000) if computing is servers[2] else ("127.0.0.1", PORT)
    body = json.loads(decoded.body)
    transfer_id = body[PARAMS]["transfer_id"]
    assert re.fullmatch("[0-9a-f]{32}", transfer_id)
    transfer = {"do_remote_prefill": True, "transfer_id": transfer_id, "remote_host": host, "remote_port": port}
    assert body == {**given, PARAMS: transfer}
    offered = {"do_remote_decode": True, "transfer_id": transfer_id}
    assert json.loads(prefilled.body) == {**prefill, "stream": False, PARAMS: offered}
    assert decoded.headers["x-request-id"] == "mine"
    assert {**prefilled.headers, "x-request-id": "mine"} == {
        **decoded.headers,
        "host": prefilled.headers["host"],
        "content-length": str(len(prefilled.body)),
    }
    assert prefilled.headers["x-request-id"] == "mine-prefill"
    assert prefilled.headers["authorization"] == "Bearer key"
    assert (decoded.path, prefilled.path) == (path, path)


def test_each_request_has_an_id_of_its_own_and_servers_take_turns(proxy: Proxy, servers: list[SimulatedGpu]):
    meet(servers)
    for _ in range(4):
        assert proxy.post("/v1/completions", BODY, X_Request_Id="x" * 128).status == 200
    assert len({params_of(request)["transfer_id"] for request in decodes(servers)}) == 4
    assert [len(server.received) for server in servers] == [2] * 4
    assert {len(request.headers["x-request-id"]) for request in received(servers)} == {128}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT[:900]}),
        ("/v1/completions", [BODY]),
        ("/v1/completions", {**BODY, "echo": True, "logprobs": 1}),
        ("/v1/completions", {**BODY, "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": [PROMPT, PROMPT]}),
        ("/v1/completions", {"prompt": [[1] * 600, [1] * 600]}),
        ("/v1/responses", {"input": PROMPT, "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": PROMPT, "conversation": "conv_1"}),
        ("/v1/responses", {"input": PROMPT, "background": True}),
        ("/v1/embeddings", {"input": PROMPT}),
        ("/v1/completions/render", BODY),
        ("/tokenize", {**BODY, PARAMS: {"do_remote_prefill": True}}),
    ],
)
def test_other_requests_go_to_one_server_as_they_are(proxy: Proxy, servers: list[SimulatedGpu], path, body):
    assert proxy.post(path, body).status == 200
    assert not prefills(servers)
    [request] = decodes(servers)
    assert request.body == json.dumps(body).encode()


@pytest.mark.parametrize("prompt", [[PROMPT], [1] * 600, [[1] * 600]])
def test_one_prompt_may_have_any_form(proxy: Proxy, servers: list[SimulatedGpu], prompt):
    meet(servers)
    assert proxy.post("/v1/completions", {"prompt": prompt}).status == 200
    assert json.loads(prefills(servers)[0].body)["prompt"] == prompt


def test_bodies_that_are_not_parsed_go_to_one_server(proxy: Proxy, servers: list[SimulatedGpu]):
    for body in (b'{"prompt": "' + b"a" * (9 << 20) + b'"}', b'{"prompt"' * 200, b"a" * 2000):
        assert proxy.request("POST", "/v1/completions", body).status == 200
        assert body in [request.body for request in decodes(servers)]
    assert not prefills(servers)


def test_the_options_of_prefill(servers: list[SimulatedGpu]):
    options = ("--prefill", servers[2].url.replace("127.0.0.1", "localhost"), "--prefill-min-bytes", "20")
    with Proxy(servers[0].url, options=options) as proxy:
        meet(servers)
        proxy.post("/v1/completions", {"prompt": "aaaaaaaaaaaaaaa"})
        assert "to 1 server, prompts to 1 more, by least-loaded" in proxy.log
        [request] = decodes(servers)
        assert params_of(request)["remote_host"] in ("127.0.0.1", "::1")  # decode servers want addresses
        servers[0].reply = lambda h: h.send(b"")
        proxy.post("/v1/completions", {})
        assert len(prefills(servers)) == 1


def test_without_prefill_servers_a_clients_own_parameters_arrive(servers: list[SimulatedGpu]):
    body = {**BODY, PARAMS: {"do_remote_prefill": True, "transfer_id": "mine"}}
    with Proxy(servers[0].url) as proxy:
        proxy.post("/v1/completions", body)
    assert decodes(servers)[0].body == json.dumps(body).encode()


def test_a_long_answer_of_a_prefill_server_is_not_read_to_its_end(proxy: Proxy, servers: list[SimulatedGpu]):
    ended = threading.Event()

    def pour(handler: Any) -> None:
        handler.begin_chunks()
        try:
            for _ in range(1000):
                handler.send_chunk(bytes(1 << 20))
        except OSError:
            ended.set()

    all_reply(servers[2:], pour)
    all_reply(servers[:2], lambda h: (ended.wait(LONGEST), h.send(b"answer")))
    assert proxy.post("/v1/completions", BODY).body == b"answer"
    assert ended.is_set()
    assert len(decodes(servers)) == 1


# ---- prefill servers that fail


def wait_for_plain(handler: Any) -> None:
    """Decode servers wait for blocks for ever, unless they are to compute the prompt themselves."""
    if params_of(handler.server.received[-1]):
        handler.connection.recv(1)
        handler.cut()
    else:
        handler.send(b"by myself")


def wait_for_the_second(handler: Any) -> None:
    """Decode servers wait for blocks for ever, unless the second prefill server computes the prompt."""
    if params_of(handler.server.received[-1])["remote_port"] == PORT:
        handler.send(b"by the second")
    else:
        handler.connection.recv(1)
        handler.cut()


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lambda h: h.send(b"", 429), "overloaded"),
        (lambda h: h.send(b"", 503), "overloaded"),
        (lambda h: h.send(b"", 500), "failed"),
        (lambda h: h.cut(), "lost"),
        (lambda h: (h.begin_chunks(), h.send_chunk(b"{"), h.cut()), "lost"),
    ],
)
def test_another_prefill_server_is_asked_if_one_fails(proxy: Proxy, servers: list[SimulatedGpu], fail, reason):
    """The decode server is as good as before: it gets the request again, and is neither lost nor unhealthy."""
    servers[2].reply = fail
    all_reply(servers[:2], wait_for_the_second)
    of_first = {"kind": "prefill", "reason": reason, "backend": servers[2].url}
    before, lost = proxy.counted("retries_total", **of_first), proxy.counted("retries_total", kind="backend")
    answers = [proxy.post("/v1/completions", BODY, X_Request_Id="again").body for _ in range(4)]
    assert answers == [b"by the second"] * 4
    failures = len(servers[2].received)
    assert failures > 0
    assert proxy.counted("retries_total", **of_first) == before + failures
    assert proxy.counted("retries_total", kind="backend") == lost
    assert proxy.counted("backend_up") == 4
    eventually(lambda: f"Request again: prefill at {servers[2].url}: " in proxy.log)
    ids = [params_of(request)["transfer_id"] for request in decodes(servers)]
    assert len(set(ids)) == len(ids)
    eventually(lambda: proxy.counted("requests_in_flight") == 0)


@pytest.mark.parametrize("fail", [lambda h: h.cut(), lambda h: h.send(b"", 503)])
def test_the_server_that_answers_computes_the_prompt_if_all_prefill_servers_fail(
    proxy: Proxy, servers: list[SimulatedGpu], fail
):
    all_reply(servers[2:], fail)
    all_reply(servers[:2], wait_for_plain)
    assert proxy.post("/v1/completions", BODY).body == b"by myself"
    assert [len(server.received) for server in servers[2:]] == [1, 1]
    assert [request.body for request in decodes(servers) if not params_of(request)] == [json.dumps(BODY).encode()]


def test_at_most_one_more_prefill_server_than_retries_is_asked(servers: list[SimulatedGpu]):
    all_reply(servers[1:], lambda h: h.send(b"", 503))
    servers[0].reply = wait_for_plain
    prefill = ("--prefill", *(server.url for server in servers[1:]))
    with Proxy(servers[0].url, options=(*prefill, "--max-retries", "0")) as proxy:
        assert proxy.post("/v1/completions", BODY).body == b"by myself"
    assert len(received(servers[1:])) == 1


@pytest.mark.parametrize("status", [400, 404])
def test_the_server_that_answers_tells_of_the_clients_mistakes(proxy: Proxy, servers: list[SimulatedGpu], status):
    all_reply(servers[2:], lambda h: h.send(b"from a prefill server", status))

    def reply(handler: Any) -> None:
        if params_of(handler.server.received[-1]):
            wait_for_plain(handler)
        else:
            handler.send(b"wrong", status)

    all_reply(servers[:2], reply)
    answer = proxy.post("/v1/completions", BODY)
    assert (answer.status, answer.body) == (status, b"wrong")
    assert len(prefills(servers)) == 1
    assert proxy.counted("retries_total", kind="prefill", reason="refused") >= 1


def test_a_prefill_that_fails_within_the_answer_changes_nothing(proxy: Proxy, servers: list[SimulatedGpu]):
    failing, failed = threading.Event(), threading.Event()
    all_reply(servers[2:], lambda h: (failing.wait(LONGEST), h.cut()))

    def stream(handler: Any) -> None:
        handler.begin_chunks()
        handler.send_chunk(b"begin ")
        assert failed.wait(LONGEST)
        handler.send_chunk(b"end")
        handler.send_chunk(b"")

    all_reply(servers[:2], stream)
    before = proxy.counted("retries_total", kind="prefill", reason="lost")
    connection = HTTPConnection(*proxy.host_and_port, timeout=LONGEST)
    connection.request("POST", "/v1/completions", json.dumps(BODY))
    response = connection.getresponse()
    assert response.read(6) == b"begin "
    failing.set()
    eventually(lambda: proxy.counted("retries_total", kind="prefill", reason="lost") == before + 1)
    failed.set()
    assert response.read() == b"end"
    assert len(received(servers)) == 2


@pytest.mark.slow
def test_prefill_servers_that_refuse_connections_leave_and_come_back(servers: list[SimulatedGpu]):
    producer = SimulatedGpu()
    servers[0].reply = wait_for_plain
    options = ("--prefill", producer.url, "--health-check-interval", "60")
    with Proxy(servers[0].url, options=options) as proxy:
        producer.stop()
        assert [proxy.post("/v1/completions", BODY).body for _ in range(3)] == [b"by myself"] * 3
        assert proxy.counted("backend_up", kind="prefill") == 0
        assert proxy.counted("backend_up", kind="backend") == 1
        assert proxy.counted("retries_total", kind="prefill", reason="unreachable") == 1
        assert proxy.get("/health")[0] == 200
    with Proxy(servers[0].url, options=("--prefill", producer.url)) as proxy:
        again = SimulatedGpu(producer.server_port)
        proxy.wait_for_backends(2)
        meet([servers[0], again])
        proxy.post("/v1/completions", BODY)
        assert len(again.received) == 1
        again.stop()


@pytest.mark.slow
def test_prefill_servers_that_are_not_healthy_or_full_are_not_asked(servers: list[SimulatedGpu]):
    servers[0].reply = wait_for_plain
    options = ("--prefill", servers[2].url, "--max-connections", "1")
    with Proxy(servers[0].url, options=options) as proxy, ThreadPoolExecutor(1) as pool:
        servers[2].health = 503
        proxy.wait_for_backends(1)
        assert proxy.post("/v1/completions", BODY).body == b"by myself"
        assert not servers[2].received
        servers[2].health = 200
        proxy.wait_for_backends(2)
    go_on = threading.Event()
    servers[2].reply = lambda h: (go_on.wait(LONGEST), h.send(b""))
    all_reply(servers[:2], lambda h: (params_of(h.server.received[-1]) and go_on.wait(LONGEST), h.send(b"done")))
    with Proxy(*(s.url for s in servers[:2]), options=options) as proxy, ThreadPoolExecutor(1) as pool:
        running = pool.submit(proxy.post, "/v1/completions", BODY)
        eventually(lambda: proxy.counted("requests_in_flight") == 2)
        assert proxy.post("/v1/completions", BODY).body == b"done"
        assert len(servers[2].received) == 1
        go_on.set()
        assert running.result().body == b"done"


@pytest.mark.slow
def test_a_prefill_server_that_does_not_respond_is_given_up(servers: list[SimulatedGpu]):
    servers[0].reply = wait_for_plain
    with stand_ins(1) as [silent]:
        options = ("--prefill", silent.url, "--health-check-timeout", "2")
        with Proxy(servers[0].url, options=options) as proxy:
            silent.responds.clear()
            assert proxy.post("/v1/completions", BODY).body == b"by myself"
            assert proxy.counted("retries_total", kind="prefill", reason="lost") == 1
            assert proxy.counted("retries_total", kind="backend") == 0
            silent.responds.set()


# ---- the end of a prefill


def test_a_prefill_is_cancelled_when_the_answer_has_ended(proxy: Proxy, servers: list[SimulatedGpu]):
    arrived, left = hold(servers[2:])
    all_reply(servers[:2], lambda h: (arrived.acquire(timeout=LONGEST), h.send(b"early")))
    assert proxy.post("/v1/completions", BODY).body == b"early"
    assert left.wait(LONGEST)
    eventually(lambda: proxy.counted("requests_in_flight") == 0)


def test_a_prefill_is_cancelled_when_the_client_leaves(proxy: Proxy, servers: list[SimulatedGpu]):
    arrived, left = hold(servers[2:])
    begun, decode_left = hold(servers[:2])
    connection = HTTPConnection(*proxy.host_and_port, timeout=LONGEST)
    connection.request("POST", "/v1/completions", json.dumps(BODY))
    assert arrived.acquire(timeout=LONGEST)
    assert begun.acquire(timeout=LONGEST)
    connection.close()
    assert left.wait(LONGEST)
    assert decode_left.wait(LONGEST)
    eventually(lambda: proxy.counted("requests_in_flight") == 0)


def test_a_request_whose_decode_server_is_lost_gets_another_prefill(proxy: Proxy, servers: list[SimulatedGpu]):
    arrived, left = hold(servers[2:])
    servers[0].reply = lambda h: (arrived.acquire(timeout=LONGEST), h.cut())
    servers[1].reply = lambda h: (arrived.acquire(timeout=LONGEST), h.send(b"here"))
    answers = [proxy.post("/v1/completions", BODY).body for _ in range(2)]  # servers take turns
    assert answers == [b"here"] * 2
    ids = [params_of(request)["transfer_id"] for request in decodes(servers)]
    assert len(set(ids)) == len(ids) == 2 + len(servers[0].received) > 2
    assert sorted(ids) == sorted(params_of(request)["transfer_id"] for request in prefills(servers))
    assert left.wait(LONGEST)


def test_requests_that_no_decode_server_answers_are_errors(proxy: Proxy, servers: list[SimulatedGpu]):
    all_reply(servers[:2], lambda h: h.cut())
    answer = proxy.post("/v1/completions", BODY)
    assert (answer.status, answer.error["code"]) == (502, "backend_lost")
    assert len(decodes(servers)) == 2


# ---- the rest


def test_the_same_prefix_goes_to_the_same_prefill_server(servers: list[SimulatedGpu]):
    meet(servers)
    prefill = ("--prefill", servers[2].url, servers[3].url)
    with Proxy(*(s.url for s in servers[:2]), options=("--policy", "prefix", *prefill)) as proxy:
        for number in range(12):
            proxy.post("/v1/completions", {"prompt": f"{PROMPT} {number}", "temperature": number})
    few, most = sorted(len(server.received) for server in servers[2:])
    # On a busy machine, a request may be sent again, also to the other, when a connection that was idle has ended.
    assert few <= 1
    assert most >= 11


def test_metrics_tell_the_kinds_of_servers_apart(servers: list[SimulatedGpu]):
    with Proxy(servers[0].url, options=("--prefill", servers[2].url)) as proxy:
        of_prefill = {"kind": "prefill", "backend": servers[2].url}
        of_decode = {"kind": "backend", "backend": servers[0].url}
        computed = 0

        def reply(handler: Any) -> None:
            eventually(lambda: proxy.counted("requests_total", **of_prefill, status="200") == computed)
            handler.send(b"")

        servers[0].reply = reply
        while computed < 3:
            computed += 1
            proxy.post("/v1/completions", BODY)
        proxy.post("/tokenize", BODY)
        eventually(lambda: proxy.counted("requests_in_flight") == 0)
        assert proxy.counted("requests_total", **of_decode, status="200") == 4
        assert proxy.counted("time_to_first_byte_seconds_count", **of_prefill) == 3
        assert proxy.counted("backend_up", **of_prefill) == 1


def test_help_tells_of_prefill_servers():
    command = [sys.executable, "-m", "quire", "route", "--help"]
    text = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "--prefill URL[=HOST:PORT]" in text
    assert "kv_producer" in text
    assert "--prefill-min-bytes BYTES" in text
    assert f"the URL's host and {PORT}" in text
