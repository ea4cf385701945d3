"""Attacks on a running server, what a second client notices of them, and what they leave in memory."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from support.accounting import Clocks, memory
from support.server import Answer, Client
from support.waiting import LONGEST

MOST_GAP = 1.0  # seconds between two tokens of a stream, beyond what is usual without an attack
MOST_GROWTH = 100e6  # bytes of memory
RETURNED_WITHIN = 60.0  # seconds, after the last answer
_NOTED = 0.2  # seconds, the most between two readings of the clocks, and the shortest gap for which they are read

Stream = Callable[[], AbstractContextManager[socket.socket]]


class Witness:
    """A second client, which streams answers while others attack.

    Its gaps are times without a token, less the time that other programs and other virtual machines took
    (Clocks.lost_since): a token that is late on a machine with much to do is no fault. A thread of the server that
    computes, sleeps, waits for a lock, or waits for a processor that the server's own worker processes use, makes a gap
    on any machine.

    baseline: the longest gap of the first answer, before the attack, in seconds. gap: the longest gap since then.
    longest_wait: the longest time without a token, whatever was the reason.
    """

    def __init__(self, open_stream: Stream) -> None:
        """open_stream: connects, and sends a request for a stream of chunks that ends with [DONE]."""
        self._open, self._calm, self._stop = open_stream, threading.Event(), threading.Event()
        self.baseline, self.gap, self.longest_wait, self.num_tokens = 0.0, 0.0, 0.0, 0
        self.failure: str | None = None
        self._clocks, self._noted, self._last = Clocks.read(), time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Returns when the baseline is known."""
        self._thread.start()
        assert self._calm.wait(LONGEST), "no answer came, without an attack"

    def end(self) -> None:
        """Returns when the last answer is complete."""
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raises AssertionError if the attack harmed the stream."""
        assert self.failure is None, self.failure
        assert self.num_tokens > 0
        assert self.gap <= self.baseline + MOST_GAP, f"a gap of {self.gap:.2f} s, and of {self.baseline:.2f} s before"

    def _run(self) -> None:
        try:
            self._last = time.monotonic()
            self._read_answer()
            self.baseline, self.gap, self.num_tokens = self.gap, 0.0, 0
            self._calm.set()
            while self.failure is None and not (self._stop.is_set() and self.num_tokens):
                self._read_answer()
        except OSError as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._calm.set()

    def _read_answer(self) -> None:
        with self._open() as raw:
            data = b""
            while not data.endswith(b"\r\n0\r\n\r\n") and (piece := raw.recv(65536)):
                self._note(piece.count(b"data: "))
                data += piece
        if b" 200 " not in data[:20] or b"[DONE]" not in data:
            self.failure = f"the stream ended with {data[-500:].decode(errors='replace')}"

    def _note(self, num_tokens: int) -> None:
        now = time.monotonic()
        gap, self._last = now - self._last, now
        self.num_tokens += num_tokens
        self.longest_wait = max(self.longest_wait, gap)
        if gap > _NOTED or now - self._noted > _NOTED:
            before, self._clocks, self._noted = self._clocks, Clocks.read(), now
            gap -= self._clocks.lost_since(before)
        self.gap = max(self.gap, gap)


@contextmanager
def witness_of(open_stream: Stream) -> Iterator[Witness]:
    """A second client. Its streams must go on."""
    subject = Witness(open_stream)
    subject.start()
    try:
        yield subject
    finally:
        subject.end()
    subject.check()


def witness(client: Client) -> AbstractContextManager[Witness]:
    """A second client of the engine."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
    return witness_of(lambda: client.connection("/v1/completions", body))


@contextmanager
def steady_memory(warm_up: Callable[[], object]) -> Iterator[None]:
    """Attacks, after which the processes of the test return to the memory that they had before.

    warm_up: makes the same kinds of request, for which libraries are loaded and the launcher of the workers is started.
    """
    warm_up()
    gc.collect()
    before = memory()
    yield
    end = time.monotonic() + RETURNED_WITHIN
    while (growth := memory() - before) > MOST_GROWTH and time.monotonic() < end:
        gc.collect()
        time.sleep(0.5)
    assert growth <= MOST_GROWTH, f"{before / 1e6:.0f} MB before the attacks, and {growth / 1e6:.0f} MB more after them"


def attack(client: Client, path: str, bodies: Sequence[Any]) -> list[Answer]:
    """The answers to all bodies at once."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: client.post(path, body), bodies))


def check_refused(answer: Answer, *statuses: int) -> str:
    """An attacker's error, which must not be a fault of the server. Returns its message."""
    assert answer.status in (statuses or (400, 413, 422, 503)), answer.body[:500]
    message = answer.error["message"]
    assert "Traceback" not in message
    return str(message)


def body(**constraint: Any) -> dict[str, Any]:
    """A request for a completion with a constraint."""
    return {"prompt": "It is", "max_tokens": 8, "temperature": 0, "structured_outputs": constraint}


def as_tool(schema: Any) -> dict[str, Any]:
    """A chat request that must call a tool with a schema for its arguments."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    message = {"role": "user", "content": "Hi"}
    return {"messages": [message], "tools": [tool], "tool_choice": "required", "max_tokens": 8}


def as_response_format(schema: Any) -> dict[str, Any]:
    """A chat request whose answer must match a schema."""
    named = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    return {"messages": [{"role": "user", "content": "Hi"}], "response_format": named, "max_tokens": 8}
