"""Signals that end a server, what a killed start leaves behind, and heads and bodies that never end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.platform.folders import scratch_folder
from quire.server.arrival import RATE, Arrival, BodyTimeoutError
from support.attacks import steady_memory, witness_of
from support.edge import send_until_closed, until_closed
from support.route import Proxy, SimulatedGpu, stand_ins
from support.waiting import LONGEST, eventually


@pytest.fixture
def server() -> Iterator[SimulatedGpu]:
    with stand_ins(1) as [server]:
        yield server


# ---- signals


@pytest.fixture
def sighup() -> Iterator[None]:
    """Processes that the test starts get SIGHUP, even if nohup started pytest."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("sighup")
def test_a_server_drains_at_sighup(server: SimulatedGpu):
    begun, may_answer = threading.Event(), threading.Event()

    def reply(handler: Any) -> None:
        begun.set()
        may_answer.wait(LONGEST)
        handler.send(b"whole")

    server.reply = reply
    with Proxy(server.url) as proxy, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(proxy.request, "GET", "/v1/a")
        assert begun.wait(LONGEST)
        proxy.process.send_signal(signal.SIGHUP)
        eventually(lambda: "Shutting down: waiting" in proxy.log)
        may_answer.set()
        assert answer.result().body == b"whole"
        assert proxy.process.wait(LONGEST) == 0


def test_a_server_that_nohup_started_outlives_its_terminal(server: SimulatedGpu):
    nohup = ("/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh")

    class Detached(Proxy):
        def __init__(self, url: str) -> None:
            super(Proxy, self).__init__("--health-check-interval", "0.1", "--backend", url, wrapper=nohup)

    with Detached(server.url) as proxy:
        proxy.process.send_signal(signal.SIGHUP)
        assert proxy.request("GET", "/v1/a").status == 200


# ---- heads and bodies of a real process


def send_stream(handler: Any) -> None:
    handler.begin_chunks()
    for data in ["a"] * 20 + ["[DONE]"]:
        handler.send_chunk(f"data: {data}\n\n".encode())
        time.sleep(0.005)
    handler.send_chunk(b"")


def test_the_proxy_bounds_heads_and_bodies_and_another_stream_goes_on(server: SimulatedGpu):
    server.reply = send_stream
    stream = b"GET /v1/stream HTTP/1.1\r\nHost: x\r\n\r\n"
    options = ("--header-timeout", "0.3", "--body-timeout", "0.3", "--h11-max-header-count", "20")
    with Proxy(server.url, options=options) as proxy:

        @contextmanager
        def connection(data: bytes) -> Iterator[socket.socket]:
            with socket.create_connection(proxy.host_and_port, timeout=LONGEST) as raw:
                raw.sendall(data)
                yield raw

        def answer_to(data: bytes, more: bytes = b"") -> bytes:
            with connection(data) as raw:
                if more:
                    send_until_closed(raw, more, 64 << 20)
                return until_closed(raw)

        head = b"POST /v1/a HTTP/1.1\r\nHost: x\r\n"
        with steady_memory(lambda: answer_to(head)), witness_of(lambda: connection(stream)):
            assert answer_to(head).startswith(b"HTTP/1.1 408 ")
            assert answer_to(head + b"Content-Length: 5\r\n\r\na").startswith(b"HTTP/1.1 408 ")
            assert answer_to(head + b"a: b\r\n" * 30 + b"\r\n").startswith(b"HTTP/1.1 431 ")
            answer_to(head + b"X: ", b"x" * 65536)
        assert {received.path for received in server.received} == {"/v1/stream"}
        assert proxy.request("GET", "/v1/a").status == 200


def test_a_body_that_comes_too_slowly_is_given_up(monkeypatch):
    monkeypatch.setattr("quire.server.arrival.RATE", 100)

    async def receive(size: int, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        return {"body": bytes(size), "more_body": True}

    async def drip() -> int:
        arrival, count = Arrival(0.2), 0
        try:
            while count < 1000:
                await arrival.next(lambda: receive(1, 0.03))
                count += 1
        except BodyTimeoutError as error:
            assert "nothing came for 0.2 s" in str(error)  # noqa: PT017
        return count

    async def pour() -> None:
        arrival = Arrival(5)
        for _ in range(10):
            await arrival.next(lambda: receive(10_000, 0.001))

    assert asyncio.run(drip()) < 100
    asyncio.run(pour())
    assert RATE == 16 << 10


# ---- folders

HOLDER = """
import sys, time
from quire.platform.folders import scratch_folder
with scratch_folder("quire-test-") as folder:
    (folder / "part").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a scratch folder, as one that compiles."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    process = subprocess.Popen([sys.executable, "-c", HOLDER], **pipes)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_start_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, abandoned = hold(tmp_path)
    running, used = hold(tmp_path)
    killed.kill()
    killed.wait()
    for folder in (abandoned, used):
        os.utime(folder, (0, 0))  # long ago
    following, _ = hold(tmp_path)
    following.communicate("")
    assert not abandoned.exists()
    with scratch_folder("quire-test-") as folder:
        assert used.exists()  # its process lives
        assert folder.parent == tmp_path
    assert not folder.exists()
    running.communicate("")
    assert not used.exists()


def test_folders_of_others_and_of_this_moment_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("quire-test-new", "quire-other-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "quire-test-link").symlink_to(tmp_path / "outside")
    os.utime(tmp_path / "quire-other-old", (0, 0))
    os.utime(tmp_path / "outside", (0, 0))
    with scratch_folder("quire-test-"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {
        "quire-test-new",
        "quire-other-old",
        "outside",
        "quire-test-link",
    }
