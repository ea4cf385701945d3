"""Limits for bodies in progress: how many bytes are read, parsed and tokenized at once, and how many large bodies.

A body is in progress from its first byte until its prompt is tokenized, not until the response is sent.
"""

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.messages.errors import error_text
from quire.server.arrival import Arrival, BodyTimeoutError
from quire.server.errors import ApiError, error_response, path_in
from quire.server.middleware import header

T = TypeVar("T")
LARGE_BODY = 20_000  # bytes; larger bodies are processed in a thread, a few at a time
TRIM_SECONDS = 1.0  # memory is returned to the system at most this often


class Preparing:
    """The requests that wait for a turn or for a job before they are sent to the engine. On shutdown, they fail with an
    error."""

    def __init__(self) -> None:
        self._ends: set[asyncio.Future[ApiError]] = set()

    def __len__(self) -> int:
        return len(self._ends)

    @contextmanager
    def end(self) -> Iterator[asyncio.Future[ApiError]]:
        """While a request waits, provide a future that receives the error with which the request should end."""
        end: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            yield end
        finally:
            self._ends.discard(end)

    def fail(self, error: ApiError) -> None:
        for end in self._ends:
            if not end.done():
                end.set_result(error)


class HeldBody:
    """A request's share of the bodies in progress. receive: ASGI's callable, which reports that the client
    disconnected."""

    def __init__(self, bodies: "BodyLimit", receive: Receive) -> None:
        self._bodies = bodies
        self._receive = receive
        self._size = 0
        self._has_turn = False
        self.large = bodies.large  # see BodyLimit

    def check(self, size: int) -> None:
        """Check a body of `size` bytes. Raises ApiError above a limit."""
        if size > self._bodies.limit:
            raise ApiError(413, f"the body may have {self._bodies.limit} bytes at most", code="body_too_large")
        if self._bodies.in_hand + max(0, size - self._size) > self._bodies.total_limit:
            message = "the server works on too many large requests; try again"
            raise ApiError(503, message, code="server_overloaded", headers={"Retry-After": "1"})

    def grow(self, size: int) -> None:
        """Count the body as `size` bytes, if that is more than before. Raises ApiError above a limit."""
        self.check(size)
        growth = max(0, size - self._size)
        self._bodies.in_hand += growth
        self._size += growth

    def grow_to_prompt(self, size: int) -> None:
        """Count the prompt that was rendered from the body, with `size` characters, if it is larger than the body. A
        template can expand a small body into a large prompt, which is then processed like a large body."""
        growth = max(0, size - self._size)
        self._bodies.in_hand += growth
        self._size += growth

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that works on the body. For a large body it runs in a thread, after waiting for a turn.

        The turn lasts until `pause` or `release`, since the parsed body takes memory. Raises ApiError if
        the client disconnects before.
        """
        if self._size < self.large:
            return function(*arguments)
        if not self._has_turn:
            await (self.unless_left(self._take_turn()) if self._bodies.turns.locked() else self._take_turn())
        return await asyncio.to_thread(function, *arguments)

    async def _take_turn(self) -> None:
        await self._bodies.turns.acquire()
        self._has_turn = True

    def pause(self) -> None:
        """End the turn early, since the request now waits for something else."""
        if self._has_turn:
            self._bodies.turns.release()
            self._has_turn = False

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work for this request alone. If the client disconnects or the server ends, the work is
        cancelled and ApiError is raised."""
        working = asyncio.create_task(work)
        leaving = asyncio.create_task(self._left())
        with self._bodies.preparing.end() as ended:
            try:
                await asyncio.wait((working, leaving, ended), return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    return working.result()
                raise ended.result() if ended.done() else ApiError(499, "the client closed the connection")
            finally:
                working.cancel()
                leaving.cancel()

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def release(self) -> None:
        """Stop counting the body: the request no longer needs it."""
        self._bodies.in_hand -= self._size
        if self._size >= LARGE_BODY:
            self._bodies.give_memory_back()
        self.pause()
        self._size = 0


STREAMED = "/api/blobs/"  # below this path, bodies are written to disk as they arrive, so they are not counted


class BodyLimit:
    """Answer 413 for a body above `limit` bytes, and 503 if all bodies in progress would exceed `total_limit`.

    Both are sent as early as possible: before the body is read, if the request has a Content-Length. The request's
    HeldBody is in its state.
    """

    def __init__(
        self, app: ASGIApp, limit: int, total_limit: int, seconds: float, preparing: Preparing, large: int = LARGE_BODY
    ) -> None:
        """seconds: the time limit of a body's Arrival. large: bytes from which a body is processed in a thread."""
        self.app = app
        self.limit = limit
        self.total_limit = max(limit, total_limit)
        self._seconds = seconds
        self.in_hand = 0
        self.preparing = preparing
        self.large = large
        # Parsing and tokenizing a large body uses much memory and a core, so few are processed at a time.
        self.turns = asyncio.Semaphore(max(2, (os.cpu_count() or 1) // 4))
        self._trimming: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = HeldBody(self, receive)
        arrival = Arrival(self._seconds)
        received = 0
        ended = False
        is_streamed = path_in(scope).startswith(STREAMED)

        async def counting_receive() -> Message:
            nonlocal received, ended
            if ended:
                return await receive()
            try:
                message: Message = await arrival.next(receive)
            except BodyTimeoutError as error:
                headers = {"Connection": "close"}
                raise ApiError(408, error_text(error), code="body_timeout", headers=headers) from None
            received += len(message.get("body", b""))
            if not is_streamed:
                held.grow(received)
            ended = not message.get("more_body", False)
            return message

        declared = header(scope, b"content-length") or b"0"
        try:
            # Rejected at once, but not counted: otherwise, clients that only announce bodies could lock out others.
            held.check(int(declared[:20]) if declared.isdigit() and not is_streamed else 0)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["body"] = held
        try:
            await self.app(scope, counting_receive, send)
        finally:
            held.release()

    def give_memory_back(self) -> None:
        """Return freed memory to the system, once for all bodies that are released within TRIM_SECONDS.

        glibc keeps freed memory: several GB after long texts.
        """
        if self._trimming is None:
            loop = asyncio.get_running_loop()
            self._trimming = loop.call_later(TRIM_SECONDS, lambda: loop.run_in_executor(None, self._trim))

    def _trim(self) -> None:
        self._trimming = None
        gc.collect()  # exceptions keep the frames that raised them alive, and with them the bodies
        if _malloc_trim is not None:
            _malloc_trim(0)


# glibc's function. Other C libraries return memory by themselves.
_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
