"""Streams of lines of JSON."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from quire.server.errors import ApiError, json_response
from quire.server.streams import EventStream

Line = dict[str, Any]


class LineStream(EventStream):
    """Lines of JSON. Clients expect nothing else, so an idle stream sends parts without text."""

    media_type = "application/x-ndjson"
    before_error = b""
    after_error = b"\n"
    done = b""


def line(part: Line) -> bytes:
    return msgspec.json.encode(part) + b"\n"


async def progress(request: Request, steps: AsyncGenerator[Line], stream: bool | None) -> Response:
    """Respond with the progress of a task: its steps as a stream, or only the last step with stream=False. The task is
    stopped if the client disconnects. Raises ApiError."""
    steps = _until_left(request, steps)
    if stream is not False:
        interval = request.app.state.config.sse_keep_alive_interval
        return await LineStream.begin(_encoded(steps), interval, line({"status": "working"}))
    last: Line = {}
    async with aclosing(steps):
        async for step in steps:
            last = step
    return json_response(last)


async def _encoded(steps: AsyncGenerator[Line]) -> AsyncGenerator[bytes]:
    async with aclosing(steps):
        async for step in steps:
            yield line(step)


async def _until_left(request: Request, steps: AsyncGenerator[Line]) -> AsyncGenerator[Line]:
    """Yield the steps. Raises ApiError when the client has disconnected."""
    leaving = asyncio.create_task(_left(request))
    try:
        async with aclosing(steps):
            while True:
                step = asyncio.ensure_future(_next(steps))
                await asyncio.wait((step, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    step.cancel()
                    await asyncio.wait((step,))
                    raise ApiError(499, "the client closed the connection")
                if (found := step.result()) is None:
                    return
                yield found
    finally:
        leaving.cancel()


async def _next(steps: AsyncGenerator[Line]) -> Line | None:
    return await anext(steps, None)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
