"""The second client of the tests of attacks notices a server that stalls, on any machine, and not a busy machine."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from support.attacks import MOST_GAP, MOST_GROWTH, Witness, steady_memory, witness_of
from support.waiting import LONGEST

PATH = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
HOGS = 8


class StallingServer:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "support.stalling_server"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=PATH)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @contextmanager
    def connection(self, path: str) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=LONGEST) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            yield raw

    def witness(self) -> AbstractContextManager[Witness]:
        return witness_of(lambda: self.connection("/stream"))

    def stall(self, path: str) -> None:
        """Returns when it has ended."""
        with self.connection(path) as raw:
            while raw.recv(4096):
                pass


@pytest.fixture(scope="module")
def server() -> Iterator[StallingServer]:
    server = StallingServer()
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.parametrize(
    "path", ["/sleep/2.5", *(pytest.param(f"/{work}/2.5", marks=pytest.mark.nightly) for work in ("compute", "work"))]
)
def test_a_server_that_stalls_is_noticed(server: StallingServer, path: str) -> None:
    with pytest.raises(AssertionError, match="a gap of"), server.witness():
        server.stall(path)


def test_a_server_that_goes_on_harms_nobody(server: StallingServer) -> None:
    with server.witness() as subject:
        server.stall("/sleep/0.1")
    assert subject.num_tokens >= 100


def test_a_stream_that_fails_is_noticed(server: StallingServer) -> None:
    paths = itertools.chain(["/stream"], itertools.repeat("/broken"))
    with (
        pytest.raises(AssertionError, match="the stream ended with"),
        witness_of(lambda: server.connection(next(paths))),
    ):
        pass


@pytest.fixture
def busy_processor(server: StallingServer) -> Iterator[None]:
    """Other programs, which are no children of this process, and the server have one processor together."""
    [processor, *_] = os.sched_getaffinity(0)
    hog = f"import os\nos.sched_setaffinity(0, [{processor}])\nwhile True: pass"
    detached = 'setsid "$0" -c "$1" >/dev/null 2>&1 & echo $!'
    command = ["/bin/sh", "-c", detached, sys.executable, hog]
    hogs = [int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(HOGS)]
    allowed = os.sched_getaffinity(server.process.pid)
    os.sched_setaffinity(server.process.pid, [processor])
    yield
    os.sched_setaffinity(server.process.pid, allowed)
    for pid in hogs:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_machine_that_is_busy_with_others_is_no_fault_of_the_server(
    server: StallingServer, busy_processor: None
) -> None:
    with server.witness() as subject:
        server.stall("/compute/0.4")  # which takes some seconds
    assert subject.gap < MOST_GAP
    assert subject.longest_wait > MOST_GAP


def take_memory() -> mmap.mmap:
    size = int(1.5 * MOST_GROWTH)
    memory = mmap.mmap(-1, size)
    for start in range(0, size, mmap.PAGESIZE):  # engines of earlier tests have malloc keep the memory of large objects
        memory[start] = 1
    return memory


def test_memory_that_is_kept_is_noticed_and_what_is_returned_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.attacks.RETURNED_WITHIN", 0.0)
    with steady_memory(list):
        take_memory().close()
    taken = []
    with pytest.raises(AssertionError, match="more after them"), steady_memory(list):
        taken.append(take_memory())
    taken.pop().close()
