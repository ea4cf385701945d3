"""The producer's half of an exchange: blocks of computed prompts are held until consumers have read them."""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from quire.kvcache.block_pool import Block
from quire.kvcache.manager import Holder, KVCacheManager
from quire.kvcache.transfers import Mover
from quire.messages.engine import EngineCoreRequest
from quire.messages.transfers import Peer, Transfer
from quire.metrics.logging import logger
from quire_transfer.core_messages import Fetch, Gone, Offer, digest
from quire_transfer.link import Asked, AskerLost, Link

UNKNOWN_SECONDS = 10.0  # how long a fetch waits for the request of its prompt
UNWANTED_SECONDS = 60.0  # how long the blocks of a computed prompt wait for a fetch
_MOST_PAST = 1000  # transfer ids to remember of prompts that are no longer offered
_MOST_HELD = 1 / 2  # the share of the pool that may be held for consumers

_Place = tuple[int, int]  # KV group and index of a block in a prompt
_FetchId = tuple[bytes, int]  # consumer and number


@dataclass
class _Fetching:
    """A fetch of an export. num_sent: of the blocks that the export offers."""

    fetch: Fetch
    num_sent: int = 0


@dataclass
class _Export:
    """A prompt that consumers may read. blocks: those that are computed, and held, by their place. offered: the places
    of those that are complete on all ranks, in this order. pending: orders whose blocks may not be. is_over: no more
    will be added. reason: why it is over too early."""

    transfer_id: str
    request_id: str
    num_tokens: int
    digest: bytes
    blocks: dict[_Place, Block] = field(default_factory=dict)
    offered: list[_Place] = field(default_factory=list)
    pending: int = 0
    fetches: dict[_FetchId, _Fetching] = field(default_factory=dict)
    is_over: bool = False
    reason: str = ""
    over_at: float = 0.0


class Exports:
    """All prompts that a producer offers. The methods are those of a Connector."""

    def __init__(
        self, kv: KVCacheManager, mover: Mover, tier: int, link: Link, facts: dict[str, str], peer: Peer
    ) -> None:
        self._kv, self._pool, self._link, self._facts, self._peer = kv, kv.pool, link, facts, peer
        self._mover, self._tier, self._orders = mover, tier, count(-2, -2)  # tiers number from 1 on
        self._complete: deque[tuple[_Export, list[_Place], bool]] = deque()  # filled by other threads
        self._most_held, self._num_held = int(_MOST_HELD * kv.pool.num_usable), 0
        self._keeps_all = [spec.first_needed_token(1 << 30) == 0 for spec in kv.specs]
        self._exports: dict[str, _Export] = {}  # by transfer id, the oldest first
        self._computing: dict[str, _Export] = {}  # by request: those that are not over
        self._by_step: dict[int, list[tuple[_Export, Holder, int]]] = {}
        self.has_changed = False  # whether blocks were given back since this was cleared
        self._past: deque[str] = deque(maxlen=_MOST_PAST)  # transfer ids of exports that were dropped
        self._early: dict[_FetchId, tuple[Fetch, float]] = {}  # without a request so far, and since when

    # ---- requests

    def add(self, source: EngineCoreRequest) -> None:
        """A request has come, or comes again after a preemption."""
        assert source.transfer is not None
        name = source.transfer.transfer_id
        if source.request_id in self._computing or name in self._exports:
            return
        export = _Export(name, source.request_id, len(source.prompt_token_ids), digest(source))
        self._exports[name] = self._computing[source.request_id] = export
        for fetch_id, (fetch, _) in list(self._early.items()):
            if fetch.transfer_id == name:
                del self._early[fetch_id]
                self._attach(export, fetch_id, fetch)

    def finish(self, request_id: str) -> None:
        """A request has ended, in any state."""
        export = self._computing.pop(request_id, None)
        if export is not None:
            export.reason = "its request ended before the prompt was computed"
            self._end(export)

    def scheduled(self, step_id: int, requests: Sequence[Holder]) -> None:
        if self._computing:
            found = [(self._computing[request.request_id], request, request.num_computed_tokens)
                     for request in requests if request.request_id in self._computing]  # fmt: skip
            if found:
                self._by_step[step_id] = found

    def withdrawn(self, step_id: int) -> None:
        self._by_step.pop(step_id, None)

    def retired(self, step_id: int) -> None:
        for export, request, num_tokens in self._by_step.pop(step_id, ()):
            if not export.is_over and request.block_tables:
                self._extend(export, request, num_tokens)

    def _extend(self, export: _Export, request: Holder, num_tokens: int) -> None:
        """Hold the full blocks of the first `num_tokens` tokens. A window's blocks are needed only at the end.

        The first rank has run the step, but others may lag behind, so all of them are asked to have it done.
        """
        size, is_over = self._kv.block_size, num_tokens >= export.num_tokens
        length, new = (export.num_tokens - 1) // size, list[_Place]()
        for group, table in enumerate(request.block_tables):
            first, stop = 0, min(num_tokens // size, length)
            if not self._keeps_all[group]:
                first = self._kv.specs[group].first_needed_token(length * size) // size if is_over else stop
            for index in range(first, stop):
                block, place = table[index], (group, index)
                if place not in export.blocks and block is not self._pool.null_block and self._has_room():
                    self._pool.share(block)
                    self._num_held += 1
                    export.blocks[place] = block
                    new.append(place)
        if new:
            export.pending += 1
            ids, keys = [export.blocks[place].block_id for place in new], [(group, b"") for group, _ in new]
            order = Transfer(next(self._orders), self._tier, False, ids, keys)
            self._mover.transfer(order).add_done_callback(partial(self._note, export, new))
        if is_over:
            self._computing.pop(export.request_id, None)
            self._end(export)

    def _note(self, export: _Export, places: list[_Place], future: Future[list[int]]) -> None:
        """Blocks are complete on all ranks. Called on any thread."""
        is_whole = future.exception() is None and not future.result()
        self._complete.append((export, places, is_whole))
        self._link.wake()

    def settle(self) -> None:
        """Offer the blocks that are complete."""
        while self._complete:
            export, places, is_whole = self._complete.popleft()
            export.pending -= 1
            if is_whole:
                export.offered += places
            elif not export.reason:
                export.reason = "a rank has failed"
            self._send(export)

    def _has_room(self) -> bool:
        if self._num_held >= self._most_held:
            unwanted = next((e for e in self._exports.values() if e.is_over and not e.fetches), None)
            if unwanted is not None:
                self._drop(unwanted)
        return self._num_held < self._most_held

    def _end(self, export: _Export) -> None:
        export.is_over, export.over_at = True, time.monotonic()
        self._send(export)
        if export.reason and not export.fetches:
            self._drop(export)

    # ---- consumers

    def asked(self, event: Asked) -> None:
        fetch_id = event.asker, event.message.number
        if not isinstance(event.message, Fetch):
            self._detach(fetch_id)
            return
        fetch = event.message
        different = [name for name, fact in self._facts.items() if fetch.facts.get(name) != fact]
        if different:
            reason = "; ".join(f"{name} is {self._facts[name]} there and {fetch.facts.get(name)} here"
                               for name in different)  # fmt: skip
            logger.error("A consumer of KV blocks does not fit to this engine: %s differs", ", ".join(different))
            self._link.tell_consumer(event.asker, Gone(fetch.number, reason, differs=True))
        elif (export := self._exports.get(fetch.transfer_id)) is None:
            if fetch.transfer_id in self._past:
                self._link.tell_consumer(event.asker, Gone(fetch.number, "its blocks have been given up"))
                return
            self._early[fetch_id] = fetch, time.monotonic()
        else:
            self._attach(export, fetch_id, fetch)

    def _attach(self, export: _Export, fetch_id: _FetchId, fetch: Fetch) -> None:
        if fetch.digest != export.digest or len(fetch.starts) != len(self._kv.specs):
            self._link.tell_consumer(fetch_id[0], Gone(fetch.number, "it has another prompt with this transfer_id"))
            return
        export.fetches[fetch_id] = _Fetching(fetch)
        self._send(export)

    def _send(self, export: _Export) -> None:
        """Offer what has not been offered so far."""
        is_last = export.is_over and not export.pending and not export.reason
        for (asker, number), fetching in export.fetches.items():
            starts = fetching.fetch.starts
            new = [place for place in export.offered[fetching.num_sent :] if place[1] >= starts[place[0]]]
            fetching.num_sent = len(export.offered)
            if new or is_last:
                ids = [export.blocks[place].block_id for place in new]
                groups, indices = [group for group, _ in new], [index for _, index in new]
                self._link.tell_consumer(asker, Offer(number, self._peer, groups, indices, ids, is_last))
            if export.reason:
                self._link.tell_consumer(asker, Gone(number, export.reason))

    def _detach(self, fetch_id: _FetchId) -> None:
        self._early.pop(fetch_id, None)
        for export in list(self._exports.values()):
            if export.fetches.pop(fetch_id, None) is not None and export.is_over and not export.fetches:
                self._drop(export)

    def asker_lost(self, event: AskerLost) -> None:
        ids = {fetch_id for export in self._exports.values() for fetch_id in export.fetches} | self._early.keys()
        for fetch_id in ids:
            if fetch_id[0] == event.asker:
                self._detach(fetch_id)

    # ---- the end

    def _drop(self, export: _Export) -> None:
        """Give back the blocks. No consumer reads them."""
        self.has_changed = True
        del self._exports[export.transfer_id]
        self._past.append(export.transfer_id)
        self._num_held -= len(export.blocks)
        self._pool.release(reversed(list(export.blocks.values())))

    def check_time(self, now: float) -> None:
        for (asker, number), (fetch, since) in list(self._early.items()):
            if now - since > UNKNOWN_SECONDS:
                del self._early[asker, number]
                reason = f"no request with transfer_id {fetch.transfer_id!r} has come"
                self._link.tell_consumer(asker, Gone(number, reason))
        for export in list(self._exports.values()):
            if export.is_over and not export.fetches and now - export.over_at > UNWANTED_SECONDS:
                self._drop(export)

    @property
    def is_idle(self) -> bool:
        return not any(export.blocks for export in self._exports.values())

    def drop_unwanted(self) -> None:
        for export in list(self._exports.values()):
            if export.is_over and not export.fetches:
                self._drop(export)
