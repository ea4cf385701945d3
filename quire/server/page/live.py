"""One stream of the engine's activity, shared by all viewers of a server's page."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import msgspec

from quire.engine.async_llm import AsyncLLM
from quire.messages.errors import error_text

LOOK_SECONDS = 0.25
MOST_VIEWERS = 100
_BEHIND = 20  # queued events after which a slow viewer starts over with the next full state


class Event(msgspec.Struct):
    """is_whole: whether the views contain the full state, not only changes. views: one per ready core. state: the
    engine's state."""

    is_whole: bool
    state: str
    restarts: int
    views: list[msgspec.Raw]


class Live:
    """Polls the cores while there are viewers. All viewers get the same events; when a viewer joins, all get the full
    state again."""

    def __init__(self, llm: AsyncLLM, is_ending: Callable[[], bool]) -> None:
        """is_ending: whether the server is shutting down, which must not wait for viewers."""
        self._llm, self._is_ending, self._numbers = llm, is_ending, count()
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._starts_over = True

    @property
    def is_full(self) -> bool:
        return len(self._viewers) >= MOST_VIEWERS

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Provide a stream of server-sent events, which ends with the engine."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._viewers.add(queue)
        self._starts_over = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="look at the engine")
        try:
            yield self._stream(queue)
        finally:
            self._viewers.discard(queue)

    async def _stream(self, queue: asyncio.Queue[bytes | None]) -> AsyncGenerator[bytes]:
        while (event := await queue.get()) is not None:
            yield event

    async def _look(self) -> None:
        viewer = ""
        while self._viewers and not self._is_ending():
            is_whole = self._starts_over
            self._starts_over = False
            if is_whole:
                viewer = f"{os.getpid()}-{next(self._numbers)}"
            try:
                views = await self._llm.look(viewer)
            except Exception as error:  # the engine is dead, so there is nothing more to show
                self._tell(msgspec.json.encode({"problem": error_text(error)}))
                self._tell(None)
                return
            client = self._llm.client
            state = client.state.name.lower()
            event = Event(is_whole, state, client.restarts, [msgspec.Raw(view) for view in views if view])
            if len(event.views) < len(views):
                self._starts_over = True  # a core was lost in between
            self._tell(msgspec.json.encode(event))
            await asyncio.sleep(LOOK_SECONDS)
        self._tell(None)

    def _tell(self, data: bytes | None) -> None:
        event = None if data is None else b"data: " + data + b"\n\n"
        for queue in self._viewers:
            if queue.qsize() >= _BEHIND and event is not None:
                while not queue.empty():
                    queue.get_nowait()
                self._starts_over = True
            else:
                queue.put_nowait(event)
