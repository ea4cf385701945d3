"""The models of a server: loads them for requests, and unloads idle ones to make room."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from quire.config.engine import ConfigError, EngineConfig
from quire.messages.errors import error_text
from quire.observability.logging import log_subject, logger
from quire.server.app import Shared
from quire.server.errors import ApiError
from quire.server.multimodel.declarations import ModelDeclaration
from quire.server.multimodel.engines import LoadedModel, load, prepare
from quire.server.multimodel.memory import Machine, gib
from quire.server.multimodel.metrics import TableMetrics
from quire.server.multimodel.room import Room, room_for
from quire.server.multimodel.served_model import ServedModel, Status

OLLAMA_KEEP_SECONDS = 300.0  # how long Ollama keeps a model after a request that does not say
_LOOK_SECONDS = 0.5  # responses in the background end without notice to the table
Source = Callable[[], Iterable[ModelDeclaration]]


class ModelTable:
    """The models of a server, by name. The first one serves requests that name none.

    A request acquires its model, which is loaded if necessary, and releases it in the end. A model with running
    requests is never unloaded. Use from one event loop.
    """

    def __init__(
        self, declarations: Sequence[ModelDeclaration], machine: Machine, shared: Shared, found: Source = tuple
    ) -> None:
        """found: declares further models, such as those that were downloaded meanwhile; may be called in a thread.
        Raises ConfigError for a name that two models have."""
        self.machine = machine
        self.metrics = TableMetrics(shared.config.metrics_prefix, self)
        self.created = int(time.time())
        self._shared = shared
        self._config = shared.config
        self._found = found
        self._models: list[ServedModel] = []
        self._by_name: dict[str, ServedModel] = {}
        self._admission = asyncio.Lock()  # one model at a time looks for memory, in the order of their requests
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self._is_ending = False
        for declaration in declarations:
            self._add(declaration)

    def _add(self, declaration: ModelDeclaration) -> None:
        if taken := [name for name in declaration.names if name in self._by_name]:
            raise ConfigError(f"two models have the name {taken[0]!r}; give one of them another name")
        model = ServedModel(declaration)
        self._models.append(model)
        self._by_name |= dict.fromkeys(declaration.names, model)

    def start(self) -> None:
        """Load the pinned models."""
        for model in self._models:
            if model.is_pinned:
                self.load(model)

    # ---- models by name

    @property
    def models(self) -> Sequence[ServedModel]:
        return self._models

    @property
    def loaded(self) -> list[tuple[ServedModel, LoadedModel]]:
        return [(model, model.loaded) for model in self._models if model.loaded is not None]

    def get(self, name: str | None) -> ServedModel | None:
        """Return the model of a name, which may be that of an adapter; the first one for None."""
        if name is None:
            return self._models[0] if self._models else None
        if (model := self._by_name.get(name)) is not None:
            return model
        return next((model for model, loaded in self.loaded if name in loaded.server.names), None)

    async def find(self, name: str | None) -> ServedModel:
        """Like `get`, but looks for new models if none has the name. Raises ApiError."""
        model = self.get(name)
        if model is None:
            await self.refresh()
            model = self.get(name)
        if model is None and name is not None:
            names = ", ".join(name for model in self._models for name in model.names)
            message = f"the model {name[:200]!r} does not exist; this server has {names or 'none'}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if model is None:
            raise ApiError(404, "this server has no model yet", param="model", code="model_not_found")
        return model

    def of_path(self, path: str | None) -> ServedModel | None:
        """Return the model with these files, given as by `canonical`."""
        return next((model for model in self._models if model.canonical == path), None)

    async def refresh(self) -> None:
        """Add models that have appeared, and remove unloaded ones that have disappeared."""
        if self._found is tuple:
            return
        declarations = {declaration.name: declaration for declaration in await asyncio.to_thread(self._found)}
        for model in [model for model in self._models if model.declaration.is_found]:
            if model.name not in declarations and model.task is None and model.loaded is None:
                self._models.remove(model)
                self._by_name = {name: other for name, other in self._by_name.items() if other is not model}
        for name, declaration in declarations.items():
            if name not in self._by_name:
                self._add(declaration)

    # ---- requests

    async def acquire(self, model: ServedModel) -> LoadedModel:
        """Return the loaded model, and keep it loaded until `release`. Raises ApiError if it cannot be loaded, or not
        in time."""
        if model.is_open:
            return model.begin()
        self._check_admits()
        waiter = model.wait()
        self.load(model, is_wanted=False)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._config.model_wait):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(model)
            if isinstance(error, TimeoutError):
                raise self._late(model) from error
            raise
        finally:
            self._num_waiting -= 1
            waiter.cancel()
            if model.status is Status.QUEUED and not model.is_awaited and model.task is not None:
                model.task.cancel()

    def release(self, model: ServedModel) -> None:
        model.end()
        self._plan_expiry(model)
        self._notify()

    def _check_admits(self) -> None:
        if self._is_ending:
            message = "the server is shutting down"
            raise ApiError(503, message, code="shutting_down", headers={"Retry-After": "5"})
        if self._num_waiting >= self._config.max_waiting_for_models:
            message = f"{self._num_waiting} requests wait for models to be loaded; try again"
            raise ApiError(503, message, code="server_overloaded", headers={"Retry-After": "5"})

    def _late(self, model: ServedModel) -> ApiError:
        seconds = self._config.model_wait
        message = f"the model {model.name!r} was not loaded within {seconds:g} s"
        busy = [f"{other.name} ({gib(other.memory)})" for other in self._models if other.num_running]
        if model.status is Status.QUEUED and model.need is not None and busy:
            message += f": it needs {model.need}, and requests are running on {', '.join(busy)}"
        return ApiError(503, message, code="model_not_loaded", headers={"Retry-After": "5"})

    # ---- loading

    def load(self, model: ServedModel, is_wanted: bool = True) -> None:
        """Begin to load a model, if it is not loaded. is_wanted: continue even if no request waits for it."""
        model.is_wanted |= is_wanted
        if model.task is None and not model.is_open:
            model.task = asyncio.create_task(self._load(model), name=f"load {model.name}")

    async def _load(self, model: ServedModel) -> None:
        log_subject.set(model.name)
        try:
            if model.loaded is not None and model.loaded.has_failed:
                await self._unload(model, "its engine has failed")
            files = None if model.loaded is not None else await self._prepare(model)
            model.status = Status.QUEUED if model.loaded is None else model.status
            async with self._admission:
                if model.loaded is None:
                    config, directory = files or await self._prepare(model)
                    cache = await self._make_room(model)
                    await self._start(model, config, directory, cache)
            model.is_closing = False
            model.admit_waiters()
        except asyncio.CancelledError:
            self._forget(model, Status.UNLOADED)
            raise
        except ApiError as error:
            self._fail(model, error.detail, error)
        except Exception as error:
            reason = error_text(error)
            message = f"the model {model.name!r} could not be loaded: {reason}"
            self._fail(model, reason, ApiError(500, message, param="model", code="model_load_failed"))
        finally:
            model.task = None
            model.is_wanted = False
            self._plan_expiry(model)
            self._notify()

    async def _prepare(self, model: ServedModel) -> tuple[EngineConfig, Path]:
        model.status = Status.PREPARING
        config, directory = await asyncio.to_thread(prepare, model.declaration)
        model.directory = directory
        if model.need is None:
            model.need = await asyncio.to_thread(self.machine.need, directory, config)
        return config, directory

    async def _start(self, model: ServedModel, config: EngineConfig, directory: Path, cache: int) -> None:
        assert model.need is not None
        model.status = Status.LOADING
        model.memory = model.need.base + cache
        model.keep_seconds = model.declaration.ttl
        began = time.monotonic()
        residence = TableResidence(self, model)
        model.loaded = await load(
            model.declaration, model.need.given(config, cache), directory, self._shared, residence
        )
        model.status = Status.LOADED
        model.problem = None
        model.loaded.app.state.draining = self._is_ending
        if not model.need.is_fixed:
            model.need = model.need.measured(model.loaded.memory)
            model.memory = model.need.base + cache
        seconds = time.monotonic() - began
        self.metrics.loaded(model.name, seconds)
        logger.info("Loaded in %.2f s, with %s of memory", seconds, gib(model.memory))

    def _fail(self, model: ServedModel, reason: str, error: ApiError) -> None:
        self._forget(model, Status.FAILED)
        model.problem = reason
        self.metrics.failed(model.name)
        logger.error("Could not be loaded: %s", reason)
        model.refuse_waiters(error)

    def _forget(self, model: ServedModel, status: Status) -> None:
        model.status = status
        model.memory = 0
        model.is_closing = False

    # ---- memory

    async def _make_room(self, model: ServedModel) -> int:
        """Unload idle models until there is room for one more. If there are too few, running requests of the least
        recently used models end first, while their new requests wait, so that no model waits forever. Returns the bytes
        of its KV cache. Raises ApiError if it can never fit."""
        model.status = Status.QUEUED
        closing: set[ServedModel] = set()
        try:
            while True:
                room = self._room(model)
                if room.is_enough:
                    assert model.need is not None
                    return model.need.cache_in(room.free)
                idle = [victim for victim in room.victims if victim.is_idle]
                await asyncio.gather(*(self._unload(victim, f"to make room for {model.name}") for victim in idle))
                if not idle:
                    for victim in room.victims:
                        victim.is_closing = True
                        closing.add(victim)
                    await self._wait_for_change()
        finally:
            for other in closing:
                other.is_closing = False
                if other.is_open:
                    other.admit_waiters()

    def _room(self, model: ServedModel) -> Room:
        assert model.need is not None
        others = [other for other in self._models if other.memory and other is not model]
        return room_for(model, others, self.machine.memory, self._config.max_loaded_models)

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _notify(self) -> None:
        self._changed.set()

    # ---- unloading

    async def unload(self, model: ServedModel) -> None:
        """Unload a model as soon as it is idle. Returns at once if requests are running. Raises ApiError for a pinned
        model."""
        if model.is_pinned:
            raise ApiError(409, f"the model {model.name!r} is pinned", param="model", code="model_pinned")
        if model.is_idle and model.task is None:
            model.task = asyncio.create_task(self._end(model, "as requested"))
            await asyncio.shield(model.task)
        elif model.loaded is not None:
            model.keep_seconds = 0

    def keep(self, model: ServedModel, seconds: float | None) -> None:
        """Unload the model after this idle time. None: only when its memory is needed."""
        model.keep_seconds = seconds
        self._plan_expiry(model)

    def _plan_expiry(self, model: ServedModel) -> None:
        seconds = model.keep_seconds
        if seconds is None or model.is_pinned or model.loaded is None or model.num_running:
            model.cancel_expiry()
            return
        model.expire_in(seconds, asyncio.get_running_loop().call_later(seconds, self._expire, model))

    def _expire(self, model: ServedModel) -> None:
        model.cancel_expiry()
        if model.task is not None:
            return
        if model.is_idle:
            model.task = asyncio.create_task(self._end(model, "after its idle time"))
        else:  # a response is generated in the background
            handle = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._expire, model)
            model.expire_in(_LOOK_SECONDS, handle)

    async def _end(self, model: ServedModel, reason: str) -> None:
        """Unload the model as its task, so that a request that arrives meanwhile loads it only afterwards."""
        await self._unload(model, reason)
        model.task = None
        if model.is_awaited:
            self.load(model, is_wanted=False)

    async def _unload(self, model: ServedModel, reason: str) -> None:
        loaded = model.loaded
        if loaded is None:
            return
        model.loaded = None
        model.status = Status.UNLOADING
        model.cancel_expiry()
        try:
            await loaded.close()
        except Exception:
            logger.exception("Model %s: its engine could not be ended in order", model.name)
        finally:
            self._forget(model, Status.UNLOADED)
            self.metrics.unloaded(model.name)
            logger.info("Model %s: unloaded, %s", model.name, reason)
            self._notify()

    # ---- the end

    def begin_to_end(self) -> None:
        """Accept no new requests. Requests that wait for models fail."""
        self._is_ending = True
        error = ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        for model in self._models:
            model.refuse_waiters(error)
            if model.loaded is not None:
                model.loaded.app.state.draining = True

    async def close(self) -> None:
        """End all engines."""
        self._is_ending = True
        tasks = [model.task for model in self._models if model.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._unload(model, "at the end") for model, _ in self.loaded))


class TableResidence:
    """Lets the requests of a model decide how long it stays loaded. The dispatcher registers them."""

    def __init__(self, table: ModelTable, model: ServedModel) -> None:
        self._table = table
        self._model = model

    @property
    def expires_at(self) -> float | None:
        return self._model.expires_at

    def keep(self, seconds: float | None) -> None:
        self._table.keep(self._model, seconds)

    def keep_by_default(self) -> None:
        ttl = self._model.declaration.ttl
        self.keep(OLLAMA_KEEP_SECONDS if ttl is None else ttl)

    async def begin(self) -> None:
        """Do nothing: the model is loaded."""

    def end(self) -> None:
        """Do nothing: the dispatcher releases the model."""

    async def unload(self) -> None:
        self.keep(0)

    async def is_loaded(self) -> bool:
        return True
