"""The bodies of requests. Each is read whole, since a request may have to be sent to another server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from quire_route.errors import RouteError, overloaded

STALL_SECONDS = 60.0  # a request is refused if no byte of its body arrives for so long

Receive = Callable[[], Awaitable[Any]]


class ClientLeft(Exception):  # noqa: N818
    """The client has closed the connection: nobody waits for an answer."""


class Bodies:
    """Bounds the bytes of each body, and those of all bodies that are held.

    A body is held from its first byte until a server has begun to answer, since it is sent again until then.
    """

    def __init__(self, limit: int, total_limit: int) -> None:
        self.limit, self.total_limit = limit, max(limit, total_limit)
        self.held = 0


class HeldBody:
    """A request's share of the bodies that are held."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._size = bodies, 0

    async def read(self, receive: Receive, declared: bytes | None) -> bytes:
        """The body. declared: the header Content-Length. Raises RouteError above a limit, before the body is read if
        its length is declared, and ClientLeft."""
        if declared is not None and declared.isdigit():
            self._grow(int(declared[:20]))
        chunks, received = [], 0
        while True:
            message = await self._next(receive)
            if chunk := message["body"]:
                chunks.append(chunk)
                received += len(chunk)
                self._grow(received)
            if not message["more_body"]:
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _next(self, receive: Receive) -> Any:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                message = await receive()
        except TimeoutError:
            text = f"nothing of the body came for {STALL_SECONDS:.0f} s"
            raise RouteError(408, text, "body_timeout", {"Connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        return message

    def _grow(self, size: int) -> None:
        """Count the body with `size` bytes, if that is more than was counted before."""
        bodies = self._bodies
        if size > bodies.limit:
            raise RouteError(413, f"the body may have {bodies.limit} bytes at most", "body_too_large")
        growth = max(0, size - self._size)
        if bodies.held + growth > bodies.total_limit:
            raise overloaded("the proxy holds too many large requests; try again")
        bodies.held += growth
        self._size += growth

    def release(self) -> None:
        """The request will not be sent again."""
        self._bodies.held -= self._size
        self._size = 0
