"""A model of a server, with its state."""

import asyncio
import time
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from quire.checkpoints.errors import ModelNotFoundError
from quire.server.errors import ApiError
from quire.server.multimodel.declarations import ModelDeclaration
from quire.server.multimodel.engines import LoadedModel
from quire.server.multimodel.memory import Need
from quire.server.ollama.facts import Facts
from quire.server.ollama.state import canonical


class Status(StrEnum):
    UNLOADED = "unloaded"
    PREPARING = "preparing"  # its files are found or downloaded
    QUEUED = "queued"  # it waits for memory
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"  # it is loaded again for the next request


class ServedModel:
    """A model of the server. Only ModelTable changes its state.

    need: what it needs, as estimated or measured; None before its first load. memory: the bytes that are reserved for
    it. num_running: the requests that use it, which keep it loaded. is_closing: it is unloaded as soon as no request
    runs, and new requests wait until it is loaded again. is_wanted: load it even if no request waits for it.
    """

    def __init__(self, declaration: ModelDeclaration) -> None:
        self.declaration = declaration
        self.status = Status.UNLOADED
        self.problem: str | None = None
        self.loaded: LoadedModel | None = None
        self.need: Need | None = None
        self.memory = 0
        self.directory: Path | None = None  # or GGUF file; known once it has been loaded
        self.facts: Facts | None = None
        self.num_running = 0
        self.is_closing = False
        self.is_wanted = False
        self.last_used = 0.0
        self.keep_seconds = declaration.ttl
        self.task: asyncio.Task[None] | None = None
        self._waiters: set[asyncio.Future[LoadedModel]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.expires_at: float | None = None  # in seconds since 1970

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def names(self) -> list[str]:
        """The names in the API, with those of all adapters."""
        return self.declaration.names if self.loaded is None else self.loaded.server.names

    @cached_property
    def canonical(self) -> str | None:
        """The model's path or repository, as created models of Ollama's API store it."""
        try:
            return canonical(self.declaration.model)
        except ModelNotFoundError:
            return self.declaration.model

    @property
    def is_open(self) -> bool:
        """Whether requests can use it right now."""
        return self.loaded is not None and not self.is_closing and not self.loaded.has_failed

    @property
    def is_pinned(self) -> bool:
        return self.declaration.pinned

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and no request uses it, also none that generates a response in the background."""
        return (
            self.loaded is not None
            and not self.num_running
            and not self.loaded.server.calls
            and (self.is_closing or not self._waiters)
        )

    @property
    def is_awaited(self) -> bool:
        return self.is_wanted or bool(self._waiters)

    # ---- requests

    def begin(self) -> LoadedModel:
        """Register a request that uses the loaded model."""
        assert self.loaded is not None
        self.num_running += 1
        self.cancel_expiry()
        self.last_used = time.monotonic()
        return self.loaded

    def end(self) -> None:
        self.num_running -= 1
        self.last_used = time.monotonic()

    def wait(self) -> asyncio.Future[LoadedModel]:
        """Return a future that receives the loaded model, for a request that is registered by then."""
        waiter: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)
        return waiter

    def admit_waiters(self) -> None:
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_result(self.begin())

    def refuse_waiters(self, error: ApiError) -> None:
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_exception(error)

    # ---- expiry

    def expire_in(self, seconds: float, expire: asyncio.TimerHandle) -> None:
        self.cancel_expiry()
        self._timer = expire
        self.expires_at = time.time() + seconds

    def cancel_expiry(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.expires_at = None
