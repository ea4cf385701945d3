"""The time limit for receiving a body. The proxy uses it, too."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

RATE = 16 << 10  # bytes per second; a slower body uses up its time


class BodyTimeoutError(Exception):
    """The body arrives too slowly. The message states the limit."""


class Arrival:
    """Receives the messages of one body.

    seconds: the longest allowed pause between messages, and the allowed delay compared with a body sent at RATE.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._until = self._loop.time() + seconds

    async def next(self, receive: Callable[[], Awaitable[Any]]) -> Any:
        """Return the next message. Raises BodyTimeoutError."""
        try:
            async with asyncio.timeout_at(self._until):
                message = await receive()
        except TimeoutError as error:
            slow = f"nothing came for {self._seconds:g} s, or less than {RATE >> 10} KiB a second"
            raise BodyTimeoutError(f"the body did not arrive: {slow}") from error
        earned = len(message.get("body", b"")) / RATE
        self._until = min(self._until + earned, self._loop.time() + self._seconds)
        return message
