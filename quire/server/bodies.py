"""The bodies in hand: how many bytes may be read, parsed and tokenized at once, and how many large ones are worked on.

A body is in hand from its first byte until its prompt is tokenized, not until it is answered.
"""

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import ApiError, error_response
from quire.server.middleware import header

LARGE_BODY = 20_000  # bytes, from which on a body is worked on in a thread, and waits for its turn
STALL_SECONDS = 60.0  # without a byte of a body that has not ended, after which its request is refused
TRIM_SECONDS = 1.0  # between two times that memory is given back to the system


class HeldBody:
    """A request's share of the bodies in hand."""

    def __init__(self, bodies: "BodyLimit") -> None:
        self._bodies, self._size, self._has_turn = bodies, 0, False

    def grow(self, size: int) -> None:
        """Count the body as of this many bytes, if that is more than before. Raises ApiError if it is too much."""
        if size > self._bodies.limit:
            raise ApiError(413, f"the body may have {self._bodies.limit} bytes at most", code="body_too_large")
        growth = max(0, size - self._size)
        if self._bodies.in_hand + growth > self._bodies.total_limit:
            message = "the server works on too many large requests; try again"
            raise ApiError(503, message, code="server_overloaded", headers={"Retry-After": "1"})
        self._bodies.in_hand += growth
        self._size += growth

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on the body: a small one at once; a large one in a thread, when it is its turn."""
        if self._size < LARGE_BODY:
            return function(*arguments)
        if not self._has_turn:
            await self._bodies.turns.acquire()
            self._has_turn = True
        return await asyncio.to_thread(function, *arguments)

    def release(self) -> None:
        """The request needs its body no more."""
        self._bodies.in_hand -= self._size
        if self._size >= LARGE_BODY:
            self._bodies.give_memory_back()
        if self._has_turn:
            self._bodies.turns.release()
        self._size, self._has_turn = 0, False


class BodyLimit:
    """413 for a body of more than `limit` bytes, 503 if all bodies in hand would have more than `total_limit`.

    Both are answered as soon as they are known: before the body is read, if the request says how long it is. The
    request's HeldBody is in its state.
    """

    def __init__(self, app: ASGIApp, limit: int, total_limit: int) -> None:
        self.app, self.limit, self.total_limit = app, limit, max(limit, total_limit)
        self.in_hand = 0
        # Of what a large body becomes while it is parsed and tokenized, 2 at a time fit in memory, and on the cores.
        self.turns = asyncio.Semaphore(max(2, (os.cpu_count() or 1) // 4))
        self._trimming: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = HeldBody(self)
        received, ended = 0, False

        async def counting_receive() -> Message:
            nonlocal received, ended
            if ended:
                return await receive()
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    message = await receive()
            except TimeoutError:
                text = f"nothing of the body came for {STALL_SECONDS:.0f} s"
                raise ApiError(408, text, code="body_timeout", headers={"Connection": "close"}) from None
            received += len(message.get("body", b""))
            held.grow(received)
            ended = not message.get("more_body", False)
            return message

        declared = header(scope, b"content-length") or b"0"
        try:
            held.grow(int(declared[:20]) if declared.isdigit() else 0)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["body"] = held
        try:
            await self.app(scope, counting_receive, send)
        finally:
            held.release()

    def give_memory_back(self) -> None:
        """Soon, and once for all that end until then. glibc keeps what is freed, several GB after long texts."""
        if self._trimming is None:
            loop = asyncio.get_running_loop()
            self._trimming = loop.call_later(TRIM_SECONDS, lambda: loop.run_in_executor(None, self._trim))

    def _trim(self) -> None:
        self._trimming = None
        gc.collect()  # errors refer to the frames that raised them, and those to bodies
        if _malloc_trim is not None:
            _malloc_trim(0)


# Of glibc; other C libraries give memory back by themselves.
_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
