"""The producer's half of an exchange: it holds the blocks of computed prompts until consumers have read them."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.kv.block_pool import Block
from quire.kv.manager import Holder, KVCacheManager
from quire.messages.engine import EngineCoreRequest
from quire.messages.transfers import Peer, replica_of
from quire.observability.logging import logger
from quire.transfer.core_messages import Elsewhere, Fetch, Gone, Offer, digest
from quire.transfer.link import Asked, AskerLost, Link

UNKNOWN_SECONDS = 10.0  # how long a fetch waits for the request of its prompt
UNWANTED_SECONDS = 60.0  # how long the blocks of a computed prompt wait for a fetch
_MOST_PAST = 1000  # remembered transfer ids of prompts that are no longer offered
_MOST_HELD = 1 / 2  # the share of the pool that may be held for consumers

_Place = tuple[int, int]  # KV group and index of a block in a prompt
_FetchId = tuple[bytes, int]  # consumer and number


@dataclass
class _Fetching:
    """A fetch of an export. num_sent: how many of the export's offered blocks were sent to the consumer."""

    fetch: Fetch
    num_sent: int = 0


@dataclass
class _Export:
    """A prompt whose blocks consumers may read. blocks: the held blocks, by place. offered: their places and the steps
    that compute them, in the order of these steps. is_over: no blocks will be added. reason: why it ended early."""

    transfer_id: str
    request_id: str
    num_tokens: int
    digest: bytes
    blocks: dict[_Place, Block] = field(default_factory=dict)
    offered: list[tuple[_Place, int]] = field(default_factory=list)
    fetches: dict[_FetchId, _Fetching] = field(default_factory=dict)
    is_over: bool = False
    reason: str = ""
    over_at: float = 0.0


class Exports:
    """All prompts that a producer offers. The methods are those of a Connector, and `hear`.

    Messages of consumers are handled on the link's thread, since the core's thread may be busy with the step that
    computes the requested blocks. Only the core's thread touches the pool.
    """

    def __init__(
        self, kv: KVCacheManager, link: Link, facts: dict[str, str], peer: Peer, replicas: Sequence[int] = ()
    ) -> None:
        """replicas: the ports at which the cores of all replicas of this engine listen; empty for a single one."""
        self._kv = kv
        self._pool = kv.pool
        self._link = link
        self._facts = facts
        self._peer = peer
        self._replicas = replicas or [port - 1 for port in peer.ports[:1]]
        self._most_held = int(_MOST_HELD * kv.pool.num_usable)
        self._num_held = 0
        self._keeps_all = [spec.first_needed_token(1 << 30) == 0 for spec in kv.specs]
        self._exports: dict[str, _Export] = {}  # by transfer id, oldest first
        self._computing: dict[str, _Export] = {}  # by request id: the exports that are not over
        self._by_step: dict[int, list[_Export]] = {}  # steps that have not been run
        self.has_changed = False  # whether blocks were released since this was last cleared
        self._unwanted: list[_Export] = []  # exports whose last fetch has ended
        self._lock = threading.Lock()  # held by all methods without an underscore
        self._past: deque[str] = deque(maxlen=_MOST_PAST)  # transfer ids of exports that were dropped
        self._early: dict[_FetchId, tuple[Fetch, float]] = {}  # fetches without a request yet, and when they arrived

    # ---- requests

    def add(self, source: EngineCoreRequest) -> None:
        """Begin the export of a new request. Does nothing if the request returns after a preemption."""
        assert source.transfer is not None
        name = source.transfer.transfer_id
        with self._lock:
            if source.request_id in self._computing or name in self._exports:
                return
            export = _Export(name, source.request_id, len(source.prompt_token_ids), digest(source))
            self._exports[name] = self._computing[source.request_id] = export
            for fetch_id, (fetch, _) in list(self._early.items()):
                if fetch.transfer_id == name:
                    del self._early[fetch_id]
                    self._attach(export, fetch_id, fetch)

    def finish(self, request_id: str) -> None:
        """Called when a request has ended, in any state."""
        with self._lock:
            if (export := self._computing.pop(request_id, None)) is not None:
                self._end(export, "its request ended before the prompt was computed")

    def scheduled(self, step_id: int, requests: Sequence[Holder]) -> None:
        if not self._computing:
            return
        with self._lock:
            for request in requests:
                if (export := self._computing.get(request.request_id)) is not None:
                    self._by_step.setdefault(step_id, []).append(export)
                    self._extend(export, request, request.num_computed_tokens, step_id)

    def withdrawn(self, step_id: int) -> None:
        with self._lock:
            for export in self._by_step.pop(step_id, ()):
                if self._exports.get(export.transfer_id) is export and not export.reason:
                    self._computing.pop(export.request_id, None)
                    self._end(export, "a step was not run")

    def retired(self, step_id: int) -> None:
        self._by_step.pop(step_id, None)

    def _extend(self, export: _Export, request: Holder, num_tokens: int, step_id: int) -> None:
        """Hold and offer all full blocks of the first `num_tokens` tokens, the ones that this step fills included. The
        blocks of a sliding window are offered only after the last step of the prompt.

        The step has not been run yet. Readers wait for it at each rank, layer by layer.
        """
        size = self._kv.block_size
        is_over = num_tokens >= export.num_tokens
        length = (export.num_tokens - 1) // size
        for group, table in enumerate(request.blocks.tables):
            first = 0
            stop = min(num_tokens // size, length)
            if not self._keeps_all[group]:
                first = self._kv.specs[group].first_needed_token(length * size) // size if is_over else stop
            for index in range(first, stop):
                block = table[index]
                place = (group, index)
                if place not in export.blocks and block is not self._pool.null_block and self._has_room():
                    self._pool.share(block)
                    self._num_held += 1
                    export.blocks[place] = block
                    export.offered.append((place, step_id))
        if is_over:
            self._computing.pop(export.request_id, None)
            self._end(export)
        else:
            self._send(export)

    def _has_room(self) -> bool:
        if self._num_held >= self._most_held:
            unwanted = next((e for e in self._exports.values() if e.is_over and not e.fetches), None)
            if unwanted is not None:
                self._drop(unwanted)
        return self._num_held < self._most_held

    def _end(self, export: _Export, reason: str = "") -> None:
        export.is_over = True
        export.over_at = time.monotonic()
        export.reason = reason
        self._send(export)
        if export.reason and not export.fetches:
            self._drop(export)

    # ---- consumers

    def hear(self, event: Asked | AskerLost) -> None:
        """Handle a message of a consumer. Called on the link's thread."""
        with self._lock:
            if isinstance(event, AskerLost):
                self._lose(event.asker)
            elif isinstance(event.message, Fetch):
                self._fetch(event.asker, event.message)
            else:
                self._detach((event.asker, event.message.number))

    def _fetch(self, asker: bytes, fetch: Fetch) -> None:
        different = [name for name, fact in self._facts.items() if fetch.facts.get(name) != fact]
        if different:
            reason = "; ".join(
                f"{name} is {self._facts[name]} there and {fetch.facts.get(name)} here" for name in different
            )
            logger.error("A consumer of KV blocks does not fit to this engine: %s differs", ", ".join(different))
            self._link.tell_consumer(asker, Gone(fetch.number, reason, differs=True))
        elif (export := self._exports.get(fetch.transfer_id)) is None:
            if fetch.transfer_id in self._past:
                self._link.tell_consumer(asker, Gone(fetch.number, "its blocks have been given up"))
            elif (port := self._port_of(fetch.transfer_id)) + 1 not in self._peer.ports:
                self._link.tell_consumer(asker, Elsewhere(fetch.number, port))
            else:
                self._early[asker, fetch.number] = fetch, time.monotonic()
        else:
            self._attach(export, (asker, fetch.number), fetch)

    def _port_of(self, transfer_id: str) -> int:
        """Return the port of the replica that computes a prompt."""
        return self._replicas[replica_of(transfer_id, len(self._replicas))]

    def _attach(self, export: _Export, fetch_id: _FetchId, fetch: Fetch) -> None:
        if fetch.digest != export.digest or len(fetch.starts) != len(self._kv.specs):
            self._link.tell_consumer(fetch_id[0], Gone(fetch.number, "it has another prompt with this transfer_id"))
            return
        export.fetches[fetch_id] = _Fetching(fetch)
        self._send(export)

    def _send(self, export: _Export) -> None:
        """Send each consumer the offers that it has not received yet."""
        is_last = export.is_over and not export.reason
        for (asker, number), fetching in export.fetches.items():
            starts = fetching.fetch.starts
            offered = export.offered[fetching.num_sent :]
            new = [place for place, _ in offered if place[1] >= starts[place[0]]]
            fetching.num_sent = len(export.offered)
            if new or is_last:
                ids = [export.blocks[place].block_id for place in new]
                groups = [group for group, _ in new]
                indices = [index for _, index in new]
                step = offered[-1][1] if offered else 0
                self._link.tell_consumer(asker, Offer(number, self._peer, groups, indices, ids, step, is_last))
            if export.reason:
                self._link.tell_consumer(asker, Gone(number, export.reason))

    def _detach(self, fetch_id: _FetchId) -> None:
        self._early.pop(fetch_id, None)
        for export in list(self._exports.values()):
            if export.fetches.pop(fetch_id, None) is not None and export.is_over and not export.fetches:
                self._unwanted.append(export)
                self._link.wake()

    def _lose(self, asker: bytes) -> None:
        ids = {fetch_id for export in self._exports.values() for fetch_id in export.fetches} | self._early.keys()
        for fetch_id in ids:
            if fetch_id[0] == asker:
                self._detach(fetch_id)

    def settle(self) -> None:
        """Release the blocks of exports whose last fetch has ended."""
        if self._unwanted:
            with self._lock:
                for export in self._unwanted:
                    self._drop(export)
                self._unwanted.clear()

    # ---- the end

    def _drop(self, export: _Export) -> None:
        """Release the blocks, unless a new fetch has started."""
        if export.fetches or self._exports.get(export.transfer_id) is not export:
            return
        self.has_changed = True
        del self._exports[export.transfer_id]
        self._past.append(export.transfer_id)
        self._num_held -= len(export.blocks)
        self._pool.release(reversed(list(export.blocks.values())))

    def check_time(self, now: float) -> None:
        with self._lock:
            for (asker, number), (fetch, since) in list(self._early.items()):
                if now - since > UNKNOWN_SECONDS:
                    del self._early[asker, number]
                    reason = f"no request with transfer_id {fetch.transfer_id!r} has come"
                    self._link.tell_consumer(asker, Gone(number, reason))
            self._drop_over(now - UNWANTED_SECONDS)

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not any(export.blocks for export in self._exports.values())

    def drop_unwanted(self) -> None:
        with self._lock:
            self._drop_over(time.monotonic())

    def _drop_over(self, before: float) -> None:
        for export in list(self._exports.values()):
            if export.is_over and not export.fetches and export.over_at < before:
                self._drop(export)
