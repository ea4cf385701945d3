"""Block transfers between the pool and the tiers: which blocks to save, to load, and to hold during a transfer."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.kv.block_pool import Block, HashedTokens
from quire.kv.hashing import extend_hashes, request_keys
from quire.kv.manager import Holder, KVCacheManager
from quire.kv.tiers import DiskTier, Tier
from quire.messages.engine import EngineCoreRequest
from quire.messages.errors import error_text
from quire.messages.transfers import BlockKey, Transfer
from quire.observability.logging import logger

LATE_SECONDS = 10.0  # after which a request recomputes the blocks it was waiting for
_MOST_HELD = 1 / 4  # the share of the pool that may be in transfer to a tier


class Mover(Protocol):
    """Copies blocks on all ranks."""

    def transfer(self, order: Transfer) -> Future[list[int]]:
        """Start a transfer, while steps run. The result contains the indices of the blocks that a rank failed to
        copy."""


@dataclass
class _Moving:
    """A transfer in progress. held: its blocks in the pool, which must not be reused until it ends. load: the load of
    which it is a part."""

    order: Transfer
    held: list[Block]
    load: "_Load | None" = None


@dataclass
class _Load:
    """A load that a request waits for. held: the blocks of its prefix that the pool has. pending: the unfinished
    transfers. indices: the positions of the loaded blocks in the request's tables."""

    request: Holder
    held: list[Block]
    indices: dict[BlockKey, int]
    late_at: float
    pending: int = 0
    transfers: list[_Moving] = field(default_factory=list)


class _Backlog:
    """Blocks that a tier is to save, the oldest first. Blocks that are evicted before their turn are skipped."""

    def __init__(self, tier: Tier, most: int, most_held: int) -> None:
        self.tier = tier
        self.most_held = most_held
        self.num_held = 0  # blocks in transfer
        self.blocks: deque[tuple[BlockKey, Block]] = deque(maxlen=most)

    def next(self) -> dict[BlockKey, Block]:
        """Return the blocks to save next."""
        chosen: dict[BlockKey, Block] = {}
        while self.blocks and self.num_held + len(chosen) < self.most_held:
            key, block = self.blocks.popleft()
            if block.block_hash == key:
                chosen[key] = block
        return chosen


class Transfers:
    """A gate at which requests wait while their blocks are looked up in tiers or loaded from them.

    Blocks are saved to all tiers when the step that filled them has retired. They are loaded when a request is next in
    line for a row and there is room for it: the pool allocates blocks for them, and holds these and the cached blocks
    before them. When the transfer ends, the loaded blocks can be found by their hashes, and the request is admitted as
    if they had always been in the pool. Blocks that fail to load or are late are recomputed.
    """

    def __init__(self, kv: KVCacheManager, tiers: Sequence[Tier], mover: Mover) -> None:
        self._kv = kv
        self._pool = kv.pool
        self.tiers = tiers
        self._mover = mover
        self.num_queries = self.num_hits = 0  # tokens that were looked up, and those that were loaded
        self._wake: Callable[[], None] = lambda: None
        self._lookups: dict[str, tuple[Future[None], float]] = {}  # by request: lookup, deadline
        self._loads: dict[str, _Load] = {}  # by request
        self._stored: list[tuple[BlockKey, Block]] = []  # blocks that became findable since the last step was scheduled
        self._by_step: dict[int, list[tuple[BlockKey, Block]]] = {}
        self.moving: dict[int, _Moving] = {}  # by the transfer's number
        self._ended: deque[tuple[int, frozenset[int]]] = deque()  # filled by other threads
        most = self._pool.num_usable
        self._backlogs = [_Backlog(tier, most, max(1, int(_MOST_HELD * most))) for tier in tiers]
        self._slow = [tier for tier in tiers if isinstance(tier, DiskTier)]
        self._stuck: set[Tier] = set()  # tiers that are late, and are skipped until they complete a transfer
        self._look_at = 0.0  # when to check again for late transfers
        self._searcher = ThreadPoolExecutor(1, "quire-kv-lookup")  # starts a thread when it is used
        self._pool.listeners.append(self)

    # ---- the gate

    def connect(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def ready(self, request: EngineCoreRequest) -> bool:
        name = request.request_id
        now = time.monotonic()
        if self._slow and name not in self._lookups and not self._stuck.issuperset(self._slow):
            search = self._searcher.submit(self._search, request)
            self._lookups[name] = search, now + LATE_SECONDS
            search.add_done_callback(lambda _: self._wake())
        lookup = self._lookups.get(name)
        if lookup is not None and not lookup[0].done() and now < lookup[1]:
            return False
        load = self._loads.get(name)
        return load is None or not load.pending or now >= load.late_at

    def _search(self, request: EngineCoreRequest) -> None:
        """Look up the prefix of a request in the slow tiers, on another thread."""
        hashes: list[bytes] = []
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        extra = request_keys(self._kv.block_size, request)
        extend_hashes(hashes, tokens, self._kv.block_size, self._kv.root, extra)
        for tier in self._slow:
            for group in range(len(self._kv.specs)):
                tier.look_up((group, block_hash) for block_hash in hashes)
            self._stuck.discard(tier)

    def finish(self, request: EngineCoreRequest) -> None:
        """Called when a request has ended, in any state. Blocks loaded for it stay in the pool."""
        self._lookups.pop(request.request_id, None)
        self._loads.pop(request.request_id, None)

    # ---- loading

    def load(self, request: Holder) -> bool:
        """Start to load the blocks of the request's longest prefix that are in a tier but not in the pool. Returns
        whether there are any; if so, the request must pass the gate again. Called when it is next in line for a row."""
        if self._loads.pop(request.request_id, None) is not None:
            return False  # it has waited for its blocks
        _, tables = self._kv.find(request, self._find)
        self.num_queries += len(request.token_ids)
        wanted: dict[int, dict[BlockKey, int]] = {}
        held: list[Block] = []
        indices: dict[BlockKey, int] = {}
        for group, table in enumerate(tables):
            for index, entry in enumerate(table):
                if isinstance(entry, Tier):
                    key = group, request.block_hashes[index]
                    wanted.setdefault(entry.number, {})[key], indices[key] = 0, index
                elif entry is not self._pool.null_block:
                    held.append(entry)
        if not wanted or not self._kv.has_room(request, held):
            return False
        for block in held:
            self._pool.share(block)
        load = _Load(request, held, indices, time.monotonic() + LATE_SECONDS)
        for number, blocks in wanted.items():
            taken = [self._pool.take() for _ in blocks]
            ids = dict(zip(blocks, (block.block_id for block in taken), strict=True))
            load.transfers.append(_Moving(self.tiers[number].load(ids), taken, load))
        load.pending = len(load.transfers)
        self._loads[request.request_id] = load
        for moving in load.transfers:
            self._start(moving)
        return True

    def _find(self, group: int, hashes: Iterable[bytes]) -> list[Any]:
        """Return for each hash the block of the pool, or the tier that has it, up to the first hash that is missing."""
        found: list[Any] = []
        for block_hash in hashes:
            key = group, block_hash
            entry = self._pool.lookup(*key) or next((tier for tier in self._usable() if tier.has(key)), None)
            if entry is None:
                break
            found.append(entry)
        return found

    def _usable(self) -> Iterable[Tier]:
        return (tier for tier in self.tiers if tier not in self._stuck)

    # ---- saving

    def on_stored(self, group: int, tokens: HashedTokens, index: int, block_id: int) -> None:
        self._stored.append(((group, tokens.block_hashes[index]), self._pool.blocks[block_id]))

    def on_removed(self, group: int, block_hash: bytes, block_id: int) -> None:
        """Removed blocks are handled when their step retires."""

    def on_cleared(self) -> None:
        """See `on_removed`."""

    def scheduled(self, step_id: int, requests: Sequence[Holder]) -> None:
        """Called when a step has been scheduled. It fills the blocks that became findable since the last call."""
        if self._stored:
            self._by_step[step_id], self._stored = self._stored, []

    def withdrawn(self, step_id: int) -> None:
        """Called when a step will not run."""
        self._by_step.pop(step_id, None)

    def retired(self, step_id: int) -> None:
        """Called when a step has run: save the blocks that it filled."""
        filled = self._by_step.pop(step_id, None)
        if filled is None:
            return
        for backlog in self._backlogs:
            backlog.blocks.extend(filled)
            self._save(backlog)

    def _save(self, backlog: _Backlog) -> None:
        if backlog.tier in self._stuck:
            return
        while blocks := backlog.next():
            order = backlog.tier.save({key: block.block_id for key, block in blocks.items()})
            if order is not None:
                held = [blocks[key] for key in order.keys]
                for block in held:
                    self._pool.share(block)
                backlog.num_held += len(held)
                self._start(_Moving(order, held))

    # ---- transfers that end

    def _start(self, moving: _Moving) -> None:
        order = moving.order
        self.moving[order.number] = moving
        self._mover.transfer(order).add_done_callback(lambda future: self._note(order, future))

    def _note(self, order: Transfer, future: Future[list[int]]) -> None:
        """Record the end of a transfer. Called on any thread."""
        error = future.exception()
        failed = range(len(order.keys)) if error is not None else future.result()
        if error is not None:
            logger.error("A transfer of %d blocks failed: %s", len(order.keys), error_text(error))
        self._ended.append((order.number, frozenset(failed)))
        self._wake()

    def settle(self) -> bool:
        """Make loaded blocks findable, and release the blocks of ended transfers. Returns whether any has ended."""
        if not self._ended:
            self.check_time()
            return False
        while self._ended:
            number, failed = self._ended.popleft()
            moving = self.moving.pop(number)
            order = moving.order
            load = moving.load
            self.tiers[order.tier].ended(order, failed)
            self._stuck.discard(self.tiers[order.tier])
            if load is None:
                self._backlogs[order.tier].num_held -= len(moving.held)
                self._pool.release(reversed(moving.held))
                self._save(self._backlogs[order.tier])
                continue
            for index, (key, block) in enumerate(zip(order.keys, moving.held, strict=True)):
                place = load.indices[key]
                hashes = load.request.block_hashes
                # New weights change the hashes.
                if index not in failed and place < len(hashes) and hashes[place] == key[1]:
                    self._pool.remember(block, key[0], load.request, place)
            self.num_hits += self._kv.block_size * sum(
                not key[0] for i, key in enumerate(order.keys) if i not in failed
            )
            load.pending -= 1
            if not load.pending:
                for part in reversed(load.transfers):
                    self._pool.release(reversed(part.held))
                self._pool.release(reversed(load.held))
        return True

    def check_time(self) -> None:
        """Let requests that have waited too long pass the gate, and skip the tiers they were waiting for."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LATE_SECONDS / 10
        late = {self.tiers[m.order.tier] for m in self.moving.values() if m.load is not None and now >= m.load.late_at}
        if any(now >= late_at and not search.done() for search, late_at in self._lookups.values()):
            late.update(self._slow)
        for tier in late - self._stuck:
            logger.warning(
                "Tier %d of the KV cache has not answered for %.0f s; it is left out until it does",
                tier.number,
                LATE_SECONDS,
            )
        if late:
            self._stuck |= late
            self._wake()

    def finish_all(self, wait: Callable[[float], bool]) -> None:
        """Wait until all transfers have ended. Raises ValueError if a tier does not respond."""
        late_at = time.monotonic() + LATE_SECONDS
        while self.moving:
            if time.monotonic() > late_at:
                raise ValueError("a tier of the KV cache does not answer; try again later")
            wait(0.1)
            self.settle()

    def close(self) -> None:
        self._searcher.shutdown(wait=False, cancel_futures=True)
