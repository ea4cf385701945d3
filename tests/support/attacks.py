"""Attacks on a running server, and what a second client notices of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from support.server import Answer, Service

MOST_GAP = 60.0  # seconds: tests run beside others on few processors; a stream that is blocked by an attack has no end


class Witness:
    """Streams answers while others attack. gap: the longest time without a token, in seconds."""

    def __init__(self, service: Service) -> None:
        self._service, self._stop = service, threading.Event()
        self.gap, self.num_tokens = 0.0, 0
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
        last = time.monotonic()
        while not self._stop.is_set():
            with self._service.connection("/v1/completions", body) as raw:
                data = b""
                while piece := raw.recv(65536):
                    now = time.monotonic()
                    self.gap, last = max(self.gap, now - last), now
                    self.num_tokens += piece.count(b"data: ")
                    data += piece
                    if data.endswith(b"0\r\n\r\n"):
                        break
                if b" 200 " not in data[:20] or b"[DONE]" not in data:
                    self.failure = data[:500].decode(errors="replace")
                    return


@contextmanager
def witness(service: Service) -> Iterator[Witness]:
    """A second client. At the end its streams must have gone on."""
    subject = Witness(service)
    subject._thread.start()
    try:
        yield subject
    finally:
        subject._stop.set()
        subject._thread.join()
    assert subject.failure is None, subject.failure
    assert subject.num_tokens > 0
    assert subject.gap < MOST_GAP


def attack(service: Service, path: str, bodies: Sequence[Any]) -> list[Answer]:
    """The answers to all bodies at once."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: service.post(path, body), bodies))


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
