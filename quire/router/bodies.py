"""The bodies of requests. Each is read completely, since a request may have to be sent to another server."""

from collections.abc import Awaitable, Callable
from typing import Any

from quire.messages.errors import error_text
from quire.router.errors import RouteError, overloaded
from quire.server.arrival import Arrival, BodyTimeoutError

Receive = Callable[[], Awaitable[Any]]


class ClientLeft(Exception):  # noqa: N818
    """The client has closed the connection and waits for no response."""


class Bodies:
    """Limits the bytes of each body, and of all bodies in memory together.

    A body stays in memory from its first byte until a server starts to respond, since it may be sent again until then.
    """

    def __init__(self, limit: int, total_limit: int, seconds: float) -> None:
        """seconds: the time limit of a body's Arrival."""
        self.limit = limit
        self.total_limit = max(limit, total_limit)
        self.seconds = seconds
        self.held = 0


class HeldBody:
    """A request's share of the bodies in memory."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    async def read(self, receive: Receive, declared: bytes | None) -> bytes:
        """Read the body. declared: the header Content-Length. Raises ClientLeft, and RouteError above a limit, before
        reading if the length is declared."""
        if declared is not None and declared.isdigit():
            self._check(int(declared[:20]))
        chunks = []
        received = 0
        arrival = Arrival(self._bodies.seconds)
        while True:
            message = await self._next(arrival, receive)
            if chunk := message["body"]:
                chunks.append(chunk)
                received += len(chunk)
                self._grow(received)
            if not message["more_body"]:
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _next(self, arrival: Arrival, receive: Receive) -> Any:
        try:
            message = await arrival.next(receive)
        except BodyTimeoutError as error:
            raise RouteError(408, error_text(error), "body_timeout", {"Connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        return message

    def _check(self, size: int) -> None:
        """Check a body of `size` bytes. Raises RouteError above a limit."""
        if size > self._bodies.limit:
            raise RouteError(413, f"the body may have {self._bodies.limit} bytes at most", "body_too_large")
        if self._bodies.held + max(0, size - self._size) > self._bodies.total_limit:
            raise overloaded("the proxy holds too many large requests; try again")

    def _grow(self, size: int) -> None:
        """Count the body as `size` bytes, if that is more than before."""
        self._check(size)
        growth = max(0, size - self._size)
        self._bodies.held += growth
        self._size += growth

    def release(self) -> None:
        """Release the body, since the request will not be sent again."""
        self._bodies.held -= self._size
        self._size = 0
