"""Moves adapters between disk, CPU memory and the model's slots. Requests wait until their adapter has a slot."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from quire.messages.engine import EngineCoreRequest
from quire.messages.errors import error_text
from quire.messages.lora import Adapter
from quire.messages.step import AdapterPlace
from quire.platform.untrusted.limits import BusyError, WorkerError

_BUSY = (BusyError, WorkerError)
_RETRY_SECONDS = 1.0  # sent to clients with a 503


class Memory(Protocol):
    """Loads adapters on all ranks."""

    def load_adapter(self, key: str, path: str) -> Future[None]:
        """Read an adapter into CPU memory in a thread. The future raises ValueError if the adapter cannot be used."""

    def drop_adapter(self, key: str) -> None:
        """Free an adapter's CPU memory."""


@dataclass
class _Loaded:
    """An adapter that is in CPU memory or being loaded. users: the requests that have passed the gate and have not
    ended, which keep it in its slot. ended: when loading ended."""

    loading: Future[None]
    ended: float = math.inf
    slot: int | None = None
    users: set[str] = field(default_factory=set)

    @property
    def may_load_again(self) -> bool:
        """Whether loading failed because the worker pool was busy. The requests that waited for it have failed."""
        if not self.loading.done() or time.monotonic() < self.ended + _RETRY_SECONDS:
            return False
        return isinstance(self.loading.exception(), _BUSY)

    def note_end(self, _: Future[None]) -> None:
        self.ended = time.monotonic()


class AdapterGate:
    """Lets a request pass when its adapter has a slot. Unused adapters are evicted in least-recently-used order: from
    slots when another adapter needs one, and from CPU memory above `max_cpu_loras`.

    At most `max_loras` adapters have users, so a step never has more. Requests for other adapters wait at the gate
    without delaying those that have passed.
    """

    def __init__(self, memory: Memory, max_loras: int, max_cpu_loras: int) -> None:
        self._memory = memory
        self._max_cpu_loras = max_cpu_loras
        self._adapters: OrderedDict[str, _Loaded] = OrderedDict()  # by key, the least recently used first
        self._free_slots = list(reversed(range(max_loras)))
        self._wake: Callable[[], None] = lambda: None

    def connect(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def ready(self, request: EngineCoreRequest) -> bool:
        """Whether the request's adapter has a slot. Raises ValueError with the reason if it cannot be loaded, and
        BusyError if a later request may load it."""
        if request.adapter is None:
            return True
        adapter = self._adapters.get(request.adapter.key)
        if adapter is None or adapter.may_load_again:
            adapter = self._load(request.adapter)
        if adapter is None:
            return False
        self._adapters.move_to_end(request.adapter.key)
        if not adapter.loading.done():
            return False
        if (error := adapter.loading.exception()) is not None:
            kind = BusyError if isinstance(error, _BUSY) else ValueError
            raise kind(f"adapter {request.adapter.name!r} cannot be used: {error_text(error)}")
        if adapter.slot is None and not self._give_slot(adapter):
            return False
        adapter.users.add(request.request_id)
        return True

    def check(self, request: EngineCoreRequest) -> None:
        """Accept any adapter; see `ready`."""

    def place(self, request: EngineCoreRequest) -> AdapterPlace | None:
        """Return the place of a request's adapter. The request has passed the gate."""
        if request.adapter is None:
            return None
        key = request.adapter.key
        slot = self._adapters[key].slot
        assert slot is not None
        return AdapterPlace(slot, key)

    def finish(self, request: EngineCoreRequest) -> None:
        """Note that a request has ended, in any state."""
        adapter = None if request.adapter is None else self._adapters.get(request.adapter.key)
        if adapter is not None:
            adapter.users.discard(request.request_id)
            if not adapter.users:
                self._wake()

    def _load(self, wanted: Adapter) -> _Loaded | None:
        self._adapters.pop(wanted.key, None)  # an adapter that was not loaded has no slot
        if len(self._adapters) >= self._max_cpu_loras:
            unused = (key for key, a in self._adapters.items() if not a.users and a.loading.done())
            oldest = next(unused, None)
            if oldest is None:
                return None
            slot = self._adapters.pop(oldest).slot
            if slot is not None:
                self._free_slots.append(slot)
            self._memory.drop_adapter(oldest)
        adapter = self._adapters[wanted.key] = _Loaded(self._memory.load_adapter(wanted.key, wanted.path))
        adapter.loading.add_done_callback(adapter.note_end)
        adapter.loading.add_done_callback(lambda future: self._wake())
        return adapter

    def _give_slot(self, adapter: _Loaded) -> bool:
        if not self._free_slots:
            oldest = next((a for a in self._adapters.values() if a.slot is not None and not a.users), None)
            if oldest is None or oldest.slot is None:
                return False
            self._free_slots.append(oldest.slot)
            oldest.slot = None
        adapter.slot = self._free_slots.pop()
        return True


class NoAdapters:
    """Replaces AdapterGate in an engine without adapters. All requests pass."""

    def check(self, request: EngineCoreRequest) -> None:
        """Raises ValueError if the request asks for an adapter."""
        if request.adapter is not None:
            raise ValueError(f"request {request.request_id}: its adapter needs an engine with enable_lora")

    def place(self, request: EngineCoreRequest) -> AdapterPlace | None:
        return None

    def finish(self, request: EngineCoreRequest) -> None: ...
