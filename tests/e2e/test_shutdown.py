"""How a server ends: drained, out of time, told twice, idle."""

from __future__ import annotations

import json
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.server import Answer, eventually, request
from support.server_process import Server
from support.waiting import LONGEST

ENDLESS = {"prompt": "Once", "max_tokens": 2000, "n": 16, "temperature": 1, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}


def ask(server: Server, **fields) -> Answer:
    return request(server.url, "POST", "/v1/completions", json.dumps({**ENDLESS, **fields}).encode(), **JSON)


def wait_for_requests(server: Server, count: int) -> None:
    eventually(lambda: json.loads(server.get("/load")[1])["server_load"] == count)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [pytest.param("drain timeout", marks=pytest.mark.slow), "second signal"])
def test_requests_that_are_cut_off_end_with_an_error_in_openais_shape(ended_by):
    arguments = ["--drain-timeout", "0.5"] if ended_by == "drain timeout" else []
    with Server(*arguments) as server, ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(ask, server, stream=True) for _ in range(2)]
        whole = pool.submit(ask, server)
        wait_for_requests(server, 3)
        eventually(lambda: server.metric("num_requests_running") == 48)
        before = server.metric("generation_tokens_total")
        eventually(lambda: server.metric("generation_tokens_total") > before + 3 * 48)  # each has some
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: "waiting up to" in server.log)
        if ended_by == "second signal":
            server.process.send_signal(signal.SIGINT)
        for stream in streams:
            *events, last = stream.result().events  # it ends with [DONE]
            assert events
            assert (last["error"]["code"], last["error"]["type"]) == ("shutting_down", "server_error")
        answer = whole.result()
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
        assert server.process.wait(LONGEST) == 0
    assert re.search(r"Shutting down: waiting up to \S+ s for 3 running requests\.", server.log)
    assert "ending 3 running requests." in server.log
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_clients_that_read_or_send_nothing_do_not_keep_the_server():
    with Server("--drain-timeout", "0.2") as server:
        connections = []
        for length in (0, 100):  # bytes that are announced and never sent
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(server.host_and_port)
            body = json.dumps({**ENDLESS, "stream": True, "logprobs": 20}).encode()
            head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
            head += [f"Content-Length: {len(body) + length}", "", ""]
            raw.sendall("\r\n".join(head).encode() + body)
            connections.append(raw)
        wait_for_requests(server, 1)
        eventually(lambda: server.metric("generation_tokens_total") > 16 * 200)  # more than the buffers hold
        assert server.stop() == 0
        for raw in connections:
            raw.close()
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_an_idle_server_ends_at_once_although_connections_are_open():
    with Server("--drain-timeout", "3600") as server:
        idle = [socket.create_connection(server.host_and_port) for _ in range(2)]
        idle[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += idle[0].recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        core = server.core
        assert server.stop() == 0
        assert not core.is_running()
        for raw in idle:
            assert raw.recv(1000) == b""
            raw.close()
    assert "running request" not in server.log
