"""Responses that stream events, with keep-alive messages while there are none."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Self

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import api_error, path_in


class EventStream(Response):
    """Sends events as they are generated. It waits for slow readers without queueing events.

    before_error, after_error: bytes around the JSON of an error that ends the stream. done: the stream's last bytes.
    keep_alive: bytes that keep proxies from closing an idle stream's connection. Clients ignore them.
    """

    media_type = "text/event-stream; charset=utf-8"
    before_error = b"data: "
    after_error = b"\n\n"
    done = b"data: [DONE]\n\n"
    keep_alive = b": keep-alive\n\n"

    def __init__(self, first: "bytes | asyncio.Task[bytes]", events: AsyncGenerator[bytes], interval: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.first = first
        self.events = events
        self.interval = interval

    @classmethod
    async def begin(cls, events: AsyncGenerator[bytes], interval: float, keep_alive: bytes | None = None) -> Self:
        """Wait for the first event, so that an earlier error gets its own response status.

        interval: seconds without an event after which the stream sends `keep_alive`; it also starts within this time. 0
        for no limit. keep_alive: instead of the class's own.
        """
        if not interval:
            return cls(await anext(events), events, interval)
        waiting = asyncio.create_task(_next(events))
        try:
            done, _ = await asyncio.wait((waiting,), timeout=interval)
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        stream = cls(waiting.result() if done else waiting, events, interval)
        stream.keep_alive = keep_alive or cls.keep_alive
        return stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sender = Sender(send, self.interval, self.keep_alive)
        async with aclosing(self.events) as events:
            try:
                await sender.send(await self._first_event(sender))
                async for event in events:
                    await sender.send(event)
                end = b""
            except Exception as error:
                scope["state"]["error"] = told = api_error(error)
                end = self.before_error + msgspec.json.encode(told.body(path_in(scope))) + self.after_error
            finally:
                sender.close()
        await send({"type": "http.response.body", "body": end + self.done, "more_body": False})

    async def _first_event(self, sender: "Sender") -> bytes:
        if isinstance(self.first, bytes):
            return self.first
        try:
            await sender.send(self.keep_alive)
            return await self.first
        finally:
            if not self.first.done():
                self.first.cancel()
                await asyncio.wait((self.first,))


async def _next(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


class Sender:
    """Sends the parts of a body, and `keep_alive` after `interval` seconds without one, unless that is 0."""

    def __init__(self, send: Send, interval: float, keep_alive: bytes) -> None:
        self._send = send
        self._interval = interval
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._is_sending, self._sent_at = False, self._loop.time()
        self._timer = self._loop.call_later(interval, self._tick) if interval else None
        self._filling: asyncio.Task[None] | None = None

    async def send(self, part: bytes) -> None:
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self._is_sending = False
        self._sent_at = self._loop.time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._filling is not None:
            self._filling.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        if now >= self._sent_at + self._interval:
            self._sent_at = now
            if not self._is_sending:  # a slow reader still has unread data
                self._filling = self._loop.create_task(self._fill())
        self._timer = self._loop.call_at(self._sent_at + self._interval, self._tick)

    async def _fill(self) -> None:
        with suppress(Exception):  # the client disconnected, which the request notices
            await self.send(self._keep_alive)
