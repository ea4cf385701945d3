"""How long an idle engine keeps its memory: Ollama's keep_alive."""

import asyncio
import time
from typing import Protocol

from quire.config.engine import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.messages.errors import error_text
from quire.observability.logging import logger


class Residence(Protocol):
    """How long a model stays in memory."""

    @property
    def expires_at(self) -> float | None:
        """Return when the model leaves memory if no request arrives, in seconds since 1970. None for never."""

    def keep(self, seconds: float | None) -> None:
        """Leave memory `seconds` after the last running or starting request ends. None: never."""

    def keep_by_default(self) -> None:
        """Stay for as long as for requests that do not say how long."""

    async def begin(self) -> None:
        """Register a request that is about to run. Waits until the model is in memory."""

    def end(self) -> None:
        """Register that a request has ended or failed to start."""

    async def unload(self) -> None:
        """Leave memory as soon as nothing runs. Returns at once if requests are running."""

    async def is_loaded(self) -> bool: ...


class KeepAlive:
    """Puts the engine to sleep when it has been idle for a while, and wakes it for the next request.

    An engine that an operator has paused or put to sleep (/pause, /sleep) is not touched. It needs enable_admin_api,
    which lets clients pause the engine, and a single API process, which handles all requests.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self._llm = llm
        self._has_effect = config.enable_admin_api and config.api_server_count == 1
        self._seconds: float | None = None
        self._num_running = 0
        self._is_asleep = False  # put to sleep by this class
        self._changing = asyncio.Lock()
        self._waiting: asyncio.Task[None] | None = None
        self._until: float | None = None

    @property
    def expires_at(self) -> float | None:
        """Return when the engine goes to sleep if no request arrives, in seconds since 1970. None for never."""
        return self._until

    def keep(self, seconds: float | None) -> None:
        """Go to sleep `seconds` after the last running or starting request ends. None: never."""
        if self._has_effect:
            self._seconds = seconds

    def keep_by_default(self) -> None:
        self.keep(None)

    async def begin(self) -> None:
        """Register a request that is about to run. Waits until the engine is awake."""
        self._num_running += 1
        self._plan()
        if self._is_asleep or self._changing.locked():
            async with self._changing:
                await self._wake()

    def end(self) -> None:
        """Register that a request has ended or failed to start."""
        self._num_running -= 1
        self._plan()

    async def unload(self) -> None:
        """Go to sleep as soon as nothing runs. Returns at once if requests are running, otherwise when the engine
        sleeps."""
        self.keep(0)
        self._plan()
        if self._waiting is not None:
            await asyncio.wait([self._waiting])

    async def is_loaded(self) -> bool:
        return not await self._llm.is_sleeping()

    def _plan(self) -> None:
        if self._changing.locked():  # it is already going to sleep
            return
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = self._until = None
        if self._seconds is not None and not self._num_running and not self._is_asleep:
            self._until = time.time() + self._seconds
            self._waiting = asyncio.create_task(self._sleep(self._seconds))

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._changing:
            if not await self._llm.is_paused() and not await self._llm.is_sleeping():
                try:
                    await self._llm.sleep(1, "wait")
                    self._is_asleep = True
                    self._seconds = None
                except ValueError as error:
                    logger.warning("The idle engine could not be put to sleep: %s", error_text(error))
        self._waiting = self._until = None

    async def _wake(self) -> None:
        if self._is_asleep and await self._llm.is_sleeping():
            await self._llm.wake_up()
        self._is_asleep = False
