"""The consumer's half of an exchange: requests wait at a gate until the blocks of their prompts have been read."""

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, count

from quire.cluster.secret import tcp_address
from quire.kv.block_pool import Block
from quire.kv.hashing import extra_keys
from quire.kv.manager import Holder, KVCacheManager
from quire.kv.transfers import Mover
from quire.messages.engine import EngineCoreRequest
from quire.messages.errors import error_text
from quire.messages.transfers import Transfer
from quire.observability.logging import logger
from quire.transfer.core_messages import Drop, Elsewhere, Fetch, Gone, Offer, digest
from quire.transfer.link import Confirmed, FetchLost, Link, ProducerLost, Told

WAIT_SECONDS = 10.0  # for room in the pool, and again for a row after the blocks have been read
_MOST_HELD = 1 / 2  # the share of the pool that may be held for requests without a row
_LOG_SECONDS = 60.0  # between two log lines about incompatible engines


class _Prompt:
    """A request that has not been scheduled, in the form that the KV cache manager needs."""

    def __init__(self, source: EngineCoreRequest, block_size: int) -> None:
        self.source = source
        self.request_id = source.request_id
        self.token_ids = source.prompt_token_ids
        self.block_hashes: list[bytes] = []
        adapter = None if source.adapter is None else source.adapter.key
        self.extra_keys = extra_keys(block_size, source.cache_salt, adapter=adapter)


@dataclass
class _Read:
    """A transfer of offered blocks. failed: None until it has ended; then the indices of the blocks that were not
    copied."""

    order: Transfer
    failed: frozenset[int] | None = None
    ended_at: float = 0.0


class _Load:
    """Loads the blocks of one prompt from one producer, for all requests with this prompt.

    blocks: the pool's blocks to fill, by KV group and index; allocated when there is room for all of them. prefix: the
    cached blocks before them. is_over: nothing more will be offered. has_ended: the requests may pass the gate.
    """

    def __init__(self, number: int, address: str, prompt: _Prompt) -> None:
        self.number = number
        self.address = address
        self.prompt = prompt
        self.requests = {prompt.request_id}
        self.blocks: dict[tuple[int, int], Block] = {}
        self.prefix: list[Block] = []
        self.reads: dict[int, _Read] = {}
        self.since = time.monotonic()  # when it started to wait for room, or for a row
        self.fetch: Fetch | None = None  # what was asked of the producer
        self.is_redirected = False  # whether another replica of the producer has the prompt
        self.has_begun = self.is_over = self.is_lost = self.has_ended = False

    @property
    def held(self) -> int:
        return len(self.blocks) + len(self.prefix)


class Imports:
    """All loads of a consumer. The methods are those of a Connector."""

    def __init__(self, kv: KVCacheManager, mover: Mover, tier: int, link: Link, facts: dict[str, str]) -> None:
        """tier: the index of the workers' store that reads blocks of other engines. facts: see Fetch."""
        self._kv = kv
        self._pool = kv.pool
        self._mover = mover
        self._tier = tier
        self._link = link
        self._facts = facts
        self._most_held = max(1, int(_MOST_HELD * self._pool.num_usable))
        self._loads: dict[str, _Load] = {}  # by request
        self._open: dict[int, _Load] = {}  # by number: loads that hold blocks or wait for room
        self._queue: deque[_Load] = deque()  # loads that wait for room
        self._numbers, self._orders = count(1), count(-1, -2)  # negative orders, since other tiers count up from 1
        self._ended: deque[tuple[_Load, int, frozenset[int]]] = deque()  # ended reads, appended by other threads
        self._logged_at = float("-inf")
        self.num_queries = self.num_hits = 0
        self.has_changed = False  # whether more requests may run than when this was last cleared

    # ---- requests

    def ready(self, source: EngineCoreRequest) -> bool:
        load = self._loads.get(source.request_id)
        if load is None:
            load = self._loads[source.request_id] = self._load_of(source)
            self._begin_next()
        return load.has_ended

    def _load_of(self, source: EngineCoreRequest) -> _Load:
        assert source.transfer is not None
        address = tcp_address(source.transfer.remote_host, source.transfer.remote_port)
        for load in self._open.values():
            other = load.prompt.source
            if other.transfer == source.transfer and digest(other) == digest(source):
                load.requests.add(source.request_id)  # another completion of the same prompt
                return load
        load = _Load(next(self._numbers), address, _Prompt(source, self._kv.block_size))
        self._open[load.number] = load
        self._queue.append(load)
        self.num_queries += len(source.prompt_token_ids)
        return load

    def finish(self, request_id: str) -> None:
        """Called when a request has ended, in any state."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            load.requests.discard(request_id)
            if not load.requests:
                self._lose(load)

    def scheduled(self, requests: Iterable[Holder]) -> None:
        """Release what is held for these requests: they now have rows, and hold their blocks themselves."""
        if self._open:
            for request in requests:
                load = self._loads.get(request.request_id)
                if load is not None and load.has_ended:
                    self._release(load)

    # ---- a load begins

    def _begin_next(self) -> None:
        """Begin queued loads in order of arrival, as long as there is room."""
        while self._queue:
            load = self._queue[0]
            if not load.has_ended and not self._begin(load):
                return
            self._queue.popleft()

    def _begin(self, load: _Load) -> bool:
        """Begin a load. Returns False if it has to wait for room."""
        size = self._kv.block_size
        prompt = load.prompt
        if self._link.has_failed:
            self._lose(load)
            return True
        num_cached, tables = self._kv.find(prompt, self._pool.lookup_all)
        length = (len(prompt.token_ids) - 1) // size
        firsts = [spec.first_needed_token(length * size) // size for spec in self._kv.specs]
        starts = [
            max(first, num_cached) if spec.first_needed_token(1 << 30) == 0 else first
            for first, spec in zip(firsts, self._kv.specs, strict=True)
        ]
        if num_cached == length:
            self._end(load)
            return True
        prefix = [block for block in chain(*tables) if block is not self._pool.null_block]
        wanted = [(group, index) for group, start in enumerate(starts) for index in range(start, length)]
        others = sum(other.held for other in self._open.values())
        if (others and others + len(prefix) + len(wanted) > self._most_held) or not self._kv.has_room(prompt, prefix):
            return False
        for block in prefix:
            self._pool.share(block)
        load.prefix = prefix
        load.has_begun = True
        load.blocks = {place: self._pool.take() for place in wanted}
        assert prompt.source.transfer is not None
        load.fetch = Fetch(load.number, prompt.source.transfer.transfer_id, digest(prompt.source), starts, self._facts)
        self._link.tell_producer(load.address, load.fetch)
        return True

    # ---- messages of the producer

    def told(self, event: Told) -> None:
        load = self._open.get(event.message.number)
        message = event.message
        if load is None or load.is_lost:
            return
        if isinstance(message, Elsewhere):
            self._redirect(load, message)
        elif isinstance(message, Gone):
            self._log(load, message)
            load.is_over = True
        else:
            self._read(load, message)
            load.is_over |= message.is_last
        self._check_end(load)

    def _redirect(self, load: _Load, message: Elsewhere) -> None:
        """Repeat a fetch at another replica of the producer, once."""
        if load.is_redirected or load.fetch is None or load.prompt.source.transfer is None:
            load.is_over = True
            return
        self._link.tell_producer(load.address, Drop(load.number))
        load.is_redirected = True
        load.address = tcp_address(load.prompt.source.transfer.remote_host, message.port)
        self._link.tell_producer(load.address, load.fetch)

    def _read(self, load: _Load, offer: Offer) -> None:
        hashes = load.prompt.block_hashes
        known = [
            (load.blocks[group, index], (group, hashes[index]), block_id)
            for group, index, block_id in zip(offer.groups, offer.indices, offer.block_ids, strict=True)
            if (group, index) in load.blocks
        ]
        if not known:
            return
        blocks, keys, slots = zip(*known, strict=True)
        ids = [block.block_id for block in blocks]
        number = next(self._orders)
        order = Transfer(number, self._tier, True, ids, list(keys), list(slots), offer.peer, offer.step)
        load.reads[number] = _Read(order)
        self._mover.transfer(order).add_done_callback(lambda future: self._note(load, order, future))

    def _note(self, load: _Load, order: Transfer, future: Future[list[int]]) -> None:
        """Record that a read has ended. Called on any thread."""
        error = future.exception()
        if error is not None:
            logger.error("%d blocks could not be read: %s", len(order.keys), error_text(error))
        failed = range(len(order.keys)) if error is not None else future.result()
        self._ended.append((load, order.number, frozenset(failed)))
        self._link.wake()

    def confirmed(self, event: Confirmed) -> None:
        for number in event.numbers:
            load = self._open.get(number)
            if load is None or load.is_lost:
                continue
            for read in list(load.reads.values()):
                if read.failed is not None and read.ended_at <= event.sent_at:
                    self._accept(load, read)
            self._check_end(load)

    def _accept(self, load: _Load, read: _Read) -> None:
        """Add the blocks of a read to the prefix cache, since the producer held them until the read had ended."""
        assert read.failed is not None
        del load.reads[read.order.number]
        by_id = {block.block_id: (place, block) for place, block in load.blocks.items()}
        for index, block_id in enumerate(read.order.block_ids):
            (group, place), block = by_id[block_id]
            if index not in read.failed:
                self._pool.remember(block, group, load.prompt, place)
                self.num_hits += self._kv.block_size * (group == 0)

    def lost(self, event: FetchLost | ProducerLost) -> None:
        for load in list(self._open.values()):
            if load.address == event.address and (isinstance(event, ProducerLost) or load.number == event.number):
                self._lose(load)

    def settle(self) -> None:
        """Process the reads that have ended, and begin queued loads."""
        while self._ended:
            load, number, failed = self._ended.popleft()
            read = load.reads[number]
            read.failed = failed
            read.ended_at = time.monotonic()
            if load.is_lost:
                del load.reads[number]
                self._release(load)
            else:
                self._link.ask_to_confirm(load.address)
        self._begin_next()

    # ---- a load ends

    def _check_end(self, load: _Load) -> None:
        if load.is_over and not load.reads and not load.has_ended:
            self._end(load)

    def _end(self, load: _Load) -> None:
        """Let the requests pass. The blocks are held until one of the requests has a row, for WAIT_SECONDS at most."""
        load.has_ended = True
        load.since = time.monotonic()
        self.has_changed = True
        self._link.wake()  # the gate lets its requests pass now
        if load.has_begun:
            self._link.tell_producer(load.address, Drop(load.number))
        if not load.held:
            self._release(load)

    def _lose(self, load: _Load) -> None:
        """End a load with the blocks accepted so far, and release it."""
        load.is_lost = True
        load.reads = {number: read for number, read in load.reads.items() if read.failed is None}
        if not load.has_ended:
            self._end(load)
        self._release(load)

    def _release(self, load: _Load) -> None:
        """Release the blocks, unless reads still write some of them."""
        if load.reads or load.number not in self._open:
            return
        self.has_changed = True
        del self._open[load.number]
        self._pool.release(reversed(list(load.blocks.values())))
        self._pool.release(reversed(load.prefix))
        load.blocks = {}
        load.prefix = []

    def check_time(self, now: float) -> None:
        for load in list(self._open.values()):
            if now - load.since > WAIT_SECONDS and (load.has_ended or not load.has_begun):
                self._lose(load)
        self._begin_next()

    @property
    def is_idle(self) -> bool:
        return not self._open

    def drop_all(self) -> None:
        for load in list(self._open.values()):
            self._lose(load)

    def _log(self, load: _Load, message: Gone) -> None:
        now = time.monotonic()
        if not message.differs:
            logger.info("Request %s is computed here: %s: %s", load.prompt.request_id, load.address, message.reason)
        elif now - self._logged_at > _LOG_SECONDS:
            self._logged_at = now
            logger.error("The engine at %s cannot give its prompts to this one: %s", load.address, message.reason)
