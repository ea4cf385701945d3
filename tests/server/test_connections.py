"""Clients that leave, and clients that read slowly."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.server import Host, Service, eventually

LONG = {"prompt": "Once upon a time", "max_tokens": 1800, "ignore_eos": True, "temperature": 0}
BODIES = {
    "/v1/completions": LONG,
    "/v1/chat/completions": {**LONG, "messages": [{"role": "user", "content": "Tell me a story."}]},
}


LABELS = {"model_name": "quire", "engine": "0", "finished_reason": "abort"}
ABORTED = ("quire:request_success_total", LABELS)


def read_until(raw: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = raw.recv(1 << 16)
        assert piece, data[-200:]
        data += piece
    return data


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_at_once(server: Service, host: Host, path, stream):
    aborted = host.llm.metrics.registry.get_sample_value(*ABORTED)
    with server.connection(path, {**BODIES[path], "stream": stream, "n": 2, "temperature": 1}) as raw:
        if stream:
            read_until(raw, b"data: ")
        eventually(lambda: host.llm.client.stats.num_running == 2)
        assert server.get("/load").json == {"server_load": 1}
    eventually(lambda: host.is_idle and server.get("/load").json == {"server_load": 0})
    assert host.llm.metrics.registry.get_sample_value(*ABORTED) == aborted + 2


def test_clients_that_leave_while_they_wait_leave_nothing(server: Service, host: Host):
    bodies = [{**LONG, "stream": n % 2 == 0, "n": 40, "temperature": 1} for n in range(6)]
    connections = [server.connection("/v1/completions", body) for body in bodies]
    for connection in connections:
        connection.__enter__()
    eventually(lambda: host.llm.client.stats.num_waiting > 0)
    for connection in connections:
        connection.__exit__(None, None, None)
    eventually(lambda: host.is_idle)
    assert server.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_client_that_resets_the_connection_leaves_nothing(server: Service, host: Host):
    with server.connection("/v1/completions", {**LONG, "stream": True}) as raw:
        read_until(raw, b"data: ")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    eventually(lambda: host.is_idle)


@pytest.mark.slow
def test_others_are_served_while_large_requests_are_worked_on(server: Service):
    messages = [{"role": "user", "content": "a"}] * 50_000
    for path, body in (("/v1/chat/completions", {"messages": messages}), ("/detokenize", {"tokens": [5] * 2_500_000})):
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(server.post, path, body)
            served = 0
            while not long.done():
                served += server.get("/health").status == 200
            assert long.result().status == (200 if path == "/detokenize" else 400)
        assert served > 5  # it would be one or two if the event loop did the work


def test_a_client_that_sends_half_a_request_holds_nothing(server: Service, host: Host):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        raw.sendall(b'Content-Length: 1000\r\n\r\n{"prompt":')
        assert server.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1
    assert host.is_idle


def test_requests_of_one_connection_come_one_after_another(server: Service):
    with server.connection("/v1/completions", {**LONG, "max_tokens": 5}) as raw:
        read_until(raw, b'"total_tokens"')
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1 200" in read_until(raw, b"\r\n\r\n")


@pytest.mark.slow
def test_slow_readers_get_everything_and_slow_nobody(host: Host):
    """Six clients read nothing at all until the others are done: what is held for them is bounded."""
    server = host.serve(send_buffer=4096)
    body = {**LONG, "stream": True, "logprobs": 20, "max_tokens": 400}
    connections = [server.connection("/v1/completions", body, receive_buffer=4096) for _ in range(6)]
    slow = [connection.__enter__() for connection in connections]
    try:
        for _ in range(4):
            assert server.complete("The king", max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20
        eventually(lambda: host.is_idle)  # the engine does not wait for them
        assert server.get("/load").json == {"server_load": 6}
        assert server.complete("The king", max_tokens=20, stream=True)
        for raw in slow:
            data = read_until(raw, b"data: [DONE]")
            assert data.count(b'"finish_reason":"length"') == 1
            assert data.count(b"data: {") < 200  # one event has all that came while it could not be sent
    finally:
        for connection in connections:
            connection.__exit__(None, None, None)
    eventually(lambda: server.get("/load").json == {"server_load": 0})


def test_a_slow_reader_that_leaves_holds_nothing(host: Host):
    server = host.serve(send_buffer=4096)
    with server.connection("/v1/completions", {**LONG, "stream": True, "logprobs": 20}, receive_buffer=4096) as raw:
        read_until(raw, b"data: ")
        before = server.metric("generation_tokens_total")
        eventually(lambda: server.metric("generation_tokens_total") > before + 200)  # more than the buffers hold
    eventually(lambda: host.is_idle and server.get("/load").json == {"server_load": 0})
