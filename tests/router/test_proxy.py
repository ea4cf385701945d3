"""What `quire route` passes on, and what it does with servers that fail in the middle of something."""

from __future__ import annotations

import gzip
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.route import Proxy, SimulatedGpu, stand_ins
from support.server import eventually
from support.waiting import LONGEST

BODY = {"prompt": "Once upon a time", "max_tokens": 5}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[SimulatedGpu]]:
    with stand_ins(2) as servers:
        yield servers


@pytest.fixture(scope="module")
def proxy(servers: list[SimulatedGpu]) -> Iterator[Proxy]:
    options = ("--session-header", "X-Session-ID", "--session-field", "user", "--max-body-bytes", "3M")
    with Proxy(*(server.url for server in servers), options=options) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _both_answer(servers: list[SimulatedGpu], proxy: Proxy) -> Iterator[None]:
    yield
    for server in servers:
        server.received.clear()
        server.health, server.load = 200, 0
        server.reply = lambda handler: handler.send(handler.server.url.encode())
    proxy.wait_for_backends(2)


def all_reply(servers: list[SimulatedGpu], reply: Any) -> None:
    for server in servers:
        server.reply = reply


def received(servers: list[SimulatedGpu]) -> list[Any]:
    return [request for server in servers for request in server.received]


def connect(proxy: Proxy, data: bytes) -> socket.socket:
    raw = socket.create_connection(proxy.host_and_port, timeout=LONGEST)
    raw.sendall(data)
    return raw


def read_until(raw: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = raw.recv(1 << 16)
        assert piece, data
        data += piece
    return data


def read_all(raw: socket.socket) -> bytes:
    data = bytearray()
    while piece := raw.recv(1 << 20):
        data += piece
    return bytes(data)


# ---- what is passed on


def test_method_path_query_and_body_arrive_as_they_were_sent(proxy: Proxy, servers: list[SimulatedGpu]):
    path = "/v1/files/a%2Fb%20c?purpose=batch&after=%C3%A9"
    body = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n\x00\xff\r\n--b--\r\n'
    for method in ("POST", "PUT", "DELETE"):
        answer = proxy.request(method, path, body, Content_Type="multipart/form-data; boundary=b")
        assert answer.status == 200
    for request, method in zip(
        sorted(received(servers), key=lambda r: r.method), ("DELETE", "POST", "PUT"), strict=True
    ):
        assert (request.method, request.path, request.body) == (method, path, body)
        assert request.headers["content-type"] == "multipart/form-data; boundary=b"


def test_headers_of_requests(proxy: Proxy, servers: list[SimulatedGpu]):
    proxy.request(
        "GET",
        "/v1/models",
        Authorization="Bearer a key",
        X_Request_Id="mine",
        Connection="close, X-Private",
        X_Private="1",
        TE="trailers",
        X_Forwarded_For="10.1.1.1",
        OpenAI_Organization="ünï".encode().decode("latin-1"),
    )
    [request] = received(servers)
    headers = request.headers
    assert headers["authorization"] == "Bearer a key"
    assert headers["x-request-id"] == "mine"
    assert headers["x-forwarded-for"] == "10.1.1.1, 127.0.0.1"
    assert headers["x-forwarded-proto"] == "http"
    assert headers["x-forwarded-host"] == proxy.url.removeprefix("http://")
    assert headers["host"] in [server.url.removeprefix("http://") for server in servers]
    assert headers["openai-organization"].encode("latin-1").decode() == "ünï"
    assert not {"x-private", "te", "user-agent", "accept", "content-length", "transfer-encoding"} & set(headers)


def test_headers_of_answers(proxy: Proxy, servers: list[SimulatedGpu]):
    packed = gzip.compress(b"{}")
    all_reply(
        servers,
        lambda h: h.send(
            packed,
            418,
            Content_Encoding="gzip",
            Keep_Alive="timeout=5",
            X_Private="1",
            Connection="X-Private",
            OpenAI_Model="a",
        ),
    )
    answer = proxy.post("/v1/completions", BODY)
    assert (answer.status, answer.body) == (418, packed)
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["openai-model"] == "a"
    assert answer.headers["x-request-id"] == received(servers)[0].headers["x-request-id"]
    assert not {"keep-alive", "x-private"} & set(answer.headers)


def test_answers_without_bodies(proxy: Proxy, servers: list[SimulatedGpu]):
    all_reply(servers, lambda h: h.send(b"abc"))
    answer = proxy.request("HEAD", "/v1/models")
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "3", b"")
    all_reply(servers, lambda h: (h.send_response(204), h.end_headers()))
    assert proxy.request("DELETE", "/v1/files/a").status == 204
    all_reply(servers, lambda h: h.send(b"", 302, Location="/elsewhere"))
    assert proxy.request("GET", "/").headers["location"] == "/elsewhere"


def test_chunks_are_passed_on_as_they_come(proxy: Proxy, servers: list[SimulatedGpu]):
    go_on = threading.Semaphore(0)
    events = [f"data: {number}\n\n".encode() for number in range(5)]

    def stream(handler: Any) -> None:
        handler.begin_chunks()
        for event in events:
            handler.send_chunk(event)
            assert go_on.acquire(timeout=LONGEST)
        handler.send_chunk(b"")

    all_reply(servers, stream)
    with connect(proxy, b"GET /v1/a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as raw:
        data = b""
        for event in events:
            data += read_until(raw, event)
            go_on.release()
        assert data.split(b"\r\n\r\n", 1)[1] + read_all(raw) == b"".join(
            b"%x\r\n%s\r\n" % (len(event), event) for event in [*events, b""]
        )


def test_requests_and_connections_are_kept_apart(proxy: Proxy, servers: list[SimulatedGpu]):
    all_reply(servers, lambda h: h.send(h.path.encode()))
    with ThreadPoolExecutor(16) as pool:
        paths = [f"/v1/{number}" for number in range(200)]
        answers = pool.map(lambda path: proxy.request("GET", path).body.decode(), paths)
        assert list(answers) == paths


# ---- bodies


def test_large_bodies_arrive_whole_and_too_large_ones_are_refused(proxy: Proxy, servers: list[SimulatedGpu]):
    body = bytes(range(256)) * (3 << 12)  # 3 MiB
    assert proxy.request("POST", "/v1/files", body).status == 200
    assert received(servers)[0].body == body
    answer = proxy.request("POST", "/v1/files", body + b"1")
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    chunked = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(proxy, chunked + b"5\r\nhello\r\n0\r\n\r\n") as raw:
        assert read_all(raw).startswith(b"HTTP/1.1 200")
    assert received(servers)[-1].body == b"hello" or received(servers)[0].body == b"hello"
    assert len(received(servers)) == 2


def test_the_bodies_of_all_requests_together_are_bounded(servers: list[SimulatedGpu]):
    limits = ("--max-body-bytes", "1M", "--max-total-body-bytes", "2M")
    with Proxy(servers[0].url, options=limits) as proxy:
        head = b"POST /v1/a HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        held = [connect(proxy, head + bytes(999_999)) for _ in range(2)]
        refused = proxy.request("POST", "/v1/a", bytes(1000))
        eventually(lambda: proxy.request("POST", "/v1/a", bytes(1_000_000)).status == 503)
        assert refused.status in (200, 503)
        for raw in held:
            raw.close()
        eventually(lambda: proxy.request("POST", "/v1/a", bytes(1_000_000)).status == 200)


def test_a_reader_that_is_slow_holds_nobody_up_and_little_memory(proxy: Proxy, servers: list[SimulatedGpu]):
    """The server of a slow reader waits, so neither it nor the proxy has much of the answer in memory."""
    sent = 0

    def stream(handler: Any) -> None:
        nonlocal sent
        if handler.path != "/v1/long":
            handler.send(b"short")
            return
        handler.begin_chunks()
        for _ in range(500):
            handler.send_chunk(bytes(1 << 16))
            sent += 1 << 16
        handler.send_chunk(b"")

    all_reply(servers, stream)
    with connect(proxy, b"GET /v1/long HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as raw:
        raw.recv(1000)
        before = -1
        while sent > before:  # until it waits
            before = sent
            for _ in range(30):
                assert proxy.request("GET", "/v1/short").body == b"short"
        assert sent < 20 << 20
        assert read_all(raw).endswith(b"\r\n0\r\n\r\n")


# ---- retries


def test_a_request_is_sent_again_if_its_server_is_lost_before_it_answers(proxy: Proxy, servers: list[SimulatedGpu]):
    for cut in (lambda h: h.cut(), lambda h: (h.begin_chunks(), h.cut())):  # without and with a head
        before = proxy.counted("retries_total", reason="lost")
        servers[0].reply = cut
        answers = [proxy.post("/v1/completions", BODY, X_Request_Id="again") for _ in range(4)]
        assert [answer.body.decode() for answer in answers] == [servers[1].url] * 4
        assert {json.dumps(BODY).encode()} == {request.body for request in received(servers)}
        assert proxy.counted("retries_total", reason="lost") > before
        eventually(lambda: f"Request again: {servers[0].url}: " in proxy.log)


def test_the_only_server_is_tried_again(servers: list[SimulatedGpu]):
    """It may have closed a connection that was idle, just when the request was sent."""
    servers[0].reply = lambda h: h.send(b"here") if len(h.server.received) > 1 else h.cut()
    with Proxy(servers[0].url) as proxy:
        assert proxy.post("/v1/completions", BODY).body == b"here"
    servers[0].received.clear()
    with Proxy(servers[0].url, options=("--max-retries", "0")) as proxy:
        assert proxy.post("/v1/completions", BODY).status == 502


def test_a_request_that_loses_two_servers_is_not_tried_again(proxy: Proxy, servers: list[SimulatedGpu]):
    all_reply(servers, lambda h: h.cut())
    answer = proxy.post("/v1/completions", BODY)
    assert (answer.status, answer.error["code"], answer.error["type"]) == (502, "backend_lost", "server_error")
    assert len(received(servers)) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_a_request_that_a_server_refuses_is_tried_at_one_other(proxy: Proxy, servers: list[SimulatedGpu], status):
    servers[0].reply = lambda h: h.send(b"full", status)
    answers = [proxy.post("/v1/completions", BODY) for _ in range(4)]
    assert [answer.body.decode() for answer in answers] == [servers[1].url] * 4
    servers[1].reply = lambda h: h.send(b"full, too", status, Retry_After="7")
    for server in servers:
        server.received.clear()
    answer = proxy.post("/v1/completions", BODY)
    assert answer.status == status
    assert len(received(servers)) == 2
    eventually(lambda: proxy.counted("requests_in_flight") == 0)


def test_an_answer_that_breaks_off_is_neither_repeated_nor_completed(proxy: Proxy, servers: list[SimulatedGpu]):
    arrived = threading.Semaphore(0)

    def break_off(handler: Any) -> None:
        if handler.path == "/v1/chunks":
            handler.begin_chunks()
            handler.send_chunk(b"begin")
        else:
            handler.send(b"", Content_Length="10")
            handler.wfile.write(b"begin")
        arrived.acquire(timeout=LONGEST)
        handler.cut()

    all_reply(servers, break_off)
    for path, rest in (("chunks", b"\r\n"), ("length", b"")):  # there is no chunk that ends it
        request = f"GET /v1/{path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: broken\r\n\r\n"
        with connect(proxy, request.encode()) as raw:
            data = read_until(raw, b"begin")
            arrived.release()
            assert (data + read_all(raw)).endswith(b"begin" + rest)
    assert len(received(servers)) == 2
    eventually(lambda: proxy.log.count(": the answer ends early") == 2)


# ---- health


def test_a_server_that_is_not_healthy_gets_nothing_until_it_is(proxy: Proxy, servers: list[SimulatedGpu]):
    servers[0].health = 503
    proxy.wait_for_backends(1)
    answers = {proxy.post("/v1/completions", BODY, X_Session_ID=str(n)).body.decode() for n in range(8)}
    assert answers == {servers[1].url}
    assert proxy.get("/health")[0] == 200
    servers[1].health = 500
    proxy.wait_for_backends(0)
    answer = proxy.post("/v1/completions", BODY)
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "no_healthy_backend", "1")
    assert proxy.get("/health")[0] == 503
    for server in servers:
        server.health = 200
    proxy.wait_for_backends(2)
    answers = {proxy.post("/v1/completions", BODY, X_Session_ID=str(n)).body.decode() for n in range(32)}
    assert len(answers) == 2


def test_a_server_that_refuses_connections_leaves_at_once_and_comes_back(servers: list[SimulatedGpu]):
    other = SimulatedGpu()
    with Proxy(other.url, servers[0].url, options=("--health-check-interval", "60")) as proxy:
        other.stop()
        answers = [proxy.post("/v1/completions", BODY).body.decode() for _ in range(4)]
        assert answers == [servers[0].url] * 4
        assert proxy.counted("backend_up") == 1
        assert proxy.counted("retries_total", reason="unreachable") == 1
    with Proxy(other.url, servers[0].url) as proxy:
        assert proxy.counted("backend_up") == 1
        again = SimulatedGpu(other.server_port)
        proxy.wait_for_backends(2)
        again.stop()


def test_a_server_that_drains_may_finish_its_requests(servers: list[SimulatedGpu]):
    go_on, draining = threading.Event(), SimulatedGpu()
    draining.reply = lambda h: (go_on.wait(LONGEST), h.send(b"done"))
    with Proxy(draining.url, servers[0].url) as proxy, ThreadPoolExecutor(1) as pool:
        running = pool.submit(proxy.post, "/v1/completions", BODY)
        eventually(lambda: draining.received)
        draining.refuse()
        proxy.wait_for_backends(1)
        assert proxy.post("/v1/completions", BODY).body.decode() == servers[0].url
        go_on.set()
        assert running.result().body == b"done"
        assert len(servers[0].received) == 1


@pytest.mark.slow
def test_requests_at_a_server_that_does_not_respond_go_to_another(servers: list[SimulatedGpu]):
    """It has not closed its connections: its machine is gone, or its process has stopped."""
    options = ("--health-check-timeout", "2")
    with stand_ins(1) as [silent], Proxy(silent.url, servers[0].url, options=options) as proxy:
        silent.responds.clear()
        answer = proxy.post("/v1/completions", BODY)
        assert answer.body.decode() == servers[0].url
        assert proxy.counted("retries_total", backend=silent.url, reason="lost") == 1
        silent.responds.set()
        proxy.wait_for_backends(2)


def test_requests_of_others_at_a_server_count(servers: list[SimulatedGpu]):
    servers[0].load = 50
    with Proxy(*(server.url for server in servers)) as proxy:
        answers = [proxy.post("/v1/completions", BODY).body.decode() for _ in range(6)]
        assert answers == [servers[1].url] * 6
        servers[0].load = 0
        eventually(lambda: proxy.post("/v1/completions", BODY).body.decode() == servers[0].url)


# ---- sessions


def test_a_session_stays_at_a_server(proxy: Proxy, servers: list[SimulatedGpu]):
    for number in range(4):
        by_header = {proxy.post("/v1/a", BODY, X_Session_ID=str(number)).body for _ in range(3)}
        by_field = {proxy.post("/v1/a", {**BODY, "user": str(number), "seed": n}).body for n in range(3)}
        assert len(by_header) == len(by_field) == 1
    # Ports are random, and so is the server of a session.
    assert len({proxy.post("/v1/a", BODY, X_Session_ID=str(number)).body for number in range(30)}) == 2


# ---- errors


def test_keys(servers: list[SimulatedGpu]):
    with Proxy(servers[0].url, options=("--api-key", "one", "two")) as proxy:
        for headers in ({}, {"Authorization": "Bearer three"}, {"X_Api_Key": "on"}):
            answer = proxy.post("/v1/completions", BODY, **headers)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error")
        for headers in ({"Authorization": "Bearer two"}, {"X_Api_Key": "one"}):
            assert proxy.post("/v1/completions", BODY, **headers).status == 200
        assert [r.headers.get("authorization") for r in servers[0].received] == ["Bearer two", None]
        assert proxy.get("/health")[0] == proxy.get("/metrics")[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-A: \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET @127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /?a=\xff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ],
)
def test_malformed_requests_reach_no_server(proxy: Proxy, servers: list[SimulatedGpu], data):
    with connect(proxy, data) as raw:
        assert read_all(raw).startswith(b"HTTP/1.1 400")
    assert not received(servers)


def test_malformed_answers_are_errors(proxy: Proxy, servers: list[SimulatedGpu]):
    all_reply(servers, lambda h: (h.wfile.write(b"nonsense\r\n\r\n"), h.cut()))
    answer = proxy.post("/v1/completions", BODY)
    assert (answer.status, answer.error["code"]) == (502, "backend_lost")


def test_a_client_that_leaves_is_forgotten_and_its_server_learns_it(proxy: Proxy, servers: list[SimulatedGpu]):
    begun, left = threading.Event(), threading.Event()

    def wait(handler: Any) -> None:
        begun.set()
        left.set() if handler.connection.recv(1) == b"" else None
        handler.cut()

    for sent in (b"", b"data: 1\n\n"):  # before and within the answer
        begun.clear()
        left.clear()
        all_reply(servers, lambda h, sent=sent: (sent and (h.begin_chunks(), h.send_chunk(sent)), wait(h)))
        with connect(proxy, b"GET /v1/a HTTP/1.1\r\nHost: x\r\n\r\n") as raw:
            assert begun.wait(LONGEST)
            if sent:
                raw.recv(1000)
        assert left.wait(LONGEST)
        eventually(lambda: proxy.counted("requests_in_flight") == 0)
    assert proxy.counted("client_disconnects_total") >= 2


def test_full_servers(servers: list[SimulatedGpu]):
    go_on = threading.Event()
    all_reply(servers, lambda h: (go_on.wait(LONGEST), h.send(b"")))
    with Proxy(servers[0].url, options=("--max-connections", "2")) as proxy, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(proxy.post, "/v1/completions", BODY) for _ in range(2)]
        eventually(lambda: proxy.counted("requests_in_flight") == 2)
        answer = proxy.post("/v1/completions", BODY)
        assert (answer.status, answer.error["code"]) == (503, "server_overloaded")
        go_on.set()
        assert [future.result().status for future in running] == [200, 200]


# ---- the end


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_time", [True, False])
def test_running_requests_may_finish_after_sigterm(servers: list[SimulatedGpu], in_time):
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def reply(handler: Any) -> None:
        begun.release()
        go_on.wait(LONGEST)
        handler.send(b"done")

    all_reply(servers, reply)
    seconds = "600" if in_time else "0.3"
    with Proxy(servers[0].url, options=("--drain-timeout", seconds)) as proxy, ThreadPoolExecutor(1) as pool:
        running = pool.submit(proxy.post, "/v1/completions", BODY)
        assert begun.acquire(timeout=LONGEST)
        proxy.process.send_signal(signal.SIGTERM)
        eventually(lambda: "waiting up to" in proxy.log)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(proxy.host_and_port)
        if in_time:
            go_on.set()
        answer = running.result()
        assert (answer.status, answer.body) == (200, b"done") or not in_time
        assert in_time or (answer.status, answer.error["code"]) == (503, "shutting_down")
        go_on.set()
        assert proxy.process.wait(LONGEST) == 0


def test_the_proxy_starts_without_torch_and_without_its_servers():
    with Proxy("http://127.0.0.1:1") as proxy:
        assert proxy.get("/health")[0] == 503
        assert "libtorch" not in Path(f"/proc/{proxy.process.pid}/maps").read_text()


def test_the_access_log_has_a_line_for_each_request(tmp_path):
    path = tmp_path / "access.log"
    with stand_ins(1) as servers, Proxy(servers[0].url, options=("--access-log", str(path))) as proxy:
        answer = proxy.post("/v1/completions?a=b", {"prompt": "x"}, User_Agent="me")
        servers[0].stop()
        eventually(lambda: proxy.get("/health")[0] == 503)
        proxy.request("GET", "/v1/models")
        eventually(lambda: path.read_text().count("\n") == 2)
    answered, refused = path.read_text().splitlines()
    assert re.fullmatch(
        rf'127\.0\.0\.1 - - \[.+\] "POST /v1/completions\?a=b HTTP/1\.1" 200 {len(answer.body)} "-" "me"', answered
    )
    assert re.fullmatch(r'127\.0\.0\.1 - - \[.+\] "GET /v1/models HTTP/1\.1" 50[23] \d+ "-" "-"', refused)
