"""The scheduler's half of the tiers: tracks which blocks are in CPU memory or on disk, and evicts them."""

import mmap
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from quire.messages.transfers import BlockKey, Transfer

MEMORY_VARIABLE = "QUIRE_KV_OFFLOADING_MEMORY"  # path of the parent process's memory, which a restarted core reuses

_numbers = count(1)  # of transfers


class Tier(ABC):
    """Storage in which blocks outlive the pool. Its methods are called on the engine core's thread."""

    number: int  # its index among the tiers of the engine

    @abstractmethod
    def has(self, key: BlockKey) -> bool:
        """Whether the tier is known to have the block. Must not block."""

    @abstractmethod
    def save(self, blocks: Mapping[BlockKey, int]) -> Transfer | None:
        """Make room for those of the pool's blocks that this tier lacks. Returns the order that saves them, or None."""

    @abstractmethod
    def load(self, blocks: Mapping[BlockKey, int]) -> Transfer:
        """Return the order that loads blocks of this tier. They are not evicted until it has ended."""

    @abstractmethod
    def ended(self, transfer: Transfer, failed: frozenset[int]) -> None:
        """Called when a transfer of this tier has ended. failed: the indices of the blocks that were not copied."""


class MemoryTier(Tier):
    """Slots for blocks in CPU memory. A new block replaces the least recently used one."""

    def __init__(self, number: int, num_slots: int, index: "SlotIndex | None" = None) -> None:
        """index: stores the keys next to the blocks, in memory that outlives this process."""
        self.number = number
        self.num_slots = num_slots
        self._index = index
        self.slots: OrderedDict[BlockKey, int] = OrderedDict()  # the least recently used first
        if index is not None:
            self.slots.update(index.read())
        used = set(self.slots.values())
        self._free = [slot for slot in reversed(range(num_slots)) if slot not in used]
        self._being_read: Counter[BlockKey] = Counter()
        self._being_written: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self.slots)

    def has(self, key: BlockKey) -> bool:
        return key in self.slots

    def save(self, blocks: Mapping[BlockKey, int]) -> Transfer | None:
        keys = []
        slots = []
        for key in blocks:
            if key in self.slots:
                self.slots.move_to_end(key)
            elif key not in self._being_written and (slot := self._take()) is not None:
                keys.append(key)
                slots.append(slot)
        self._being_written.update(keys)
        return (
            Transfer(next(_numbers), self.number, False, [blocks[key] for key in keys], keys, slots) if keys else None
        )

    def load(self, blocks: Mapping[BlockKey, int]) -> Transfer:
        self._being_read.update(blocks.keys())
        slots = [self.slots[key] for key in blocks]
        return Transfer(next(_numbers), self.number, True, list(blocks.values()), list(blocks), slots)

    def ended(self, transfer: Transfer, failed: frozenset[int]) -> None:
        for place, (key, slot) in enumerate(zip(transfer.keys, transfer.slots, strict=True)):
            if transfer.is_load:
                self._being_read[key] -= 1
                if not self._being_read[key]:
                    del self._being_read[key]
                if key in self.slots:
                    self.slots.move_to_end(key)
                continue
            self._being_written.discard(key)
            if place in failed:
                self._free.append(slot)
                continue
            self.slots[key] = slot
            if self._index is not None:
                self._index.write(slot, key)

    def _take(self) -> int | None:
        """Return a slot for another block; None if all blocks are being read or written."""
        if not self._free:
            oldest = next((key for key in self.slots if key not in self._being_read), None)
            if oldest is not None:
                self.give_up(oldest)
        return self._free.pop() if self._free else None

    def give_up(self, key: BlockKey) -> None:
        slot = self.slots.pop(key)
        if self._index is not None:
            self._index.erase(slot)
        self._free.append(slot)


class SlotIndex:
    """The keys of a memory tier's slots, stored next to the blocks, so that a restarted core can find them.

    It is at the beginning of the memory: a header with the root of all hashes, then a record for each slot. A record is
    written when all ranks have copied the block, and erased before the slot is written again.
    """

    RECORD = struct.Struct("<Qq32s16x")  # number of the record, 0 for none; KV group; hash

    def __init__(self, memory: Path, num_slots: int, root: bytes) -> None:
        """root: see `hash_root`. Blocks stored for another root are forgotten. Raises OSError."""
        self._num_slots = num_slots
        size = self.RECORD.size
        handle = os.open(memory, os.O_RDWR)
        try:
            self._memory = mmap.mmap(handle, (1 + num_slots) * size)
        finally:
            os.close(handle)
        head = root.ljust(size, b"\0")
        if self._memory[:size] != head:
            self._memory[size:] = bytes(num_slots * size)
            self._memory[:size] = head
        self._written = count(1 + max((number for number, *_ in self._records()), default=0))

    def read(self) -> Iterable[tuple[BlockKey, int]]:
        """Yield the keys and their slots, in the order in which they were written."""
        for _, slot, key in sorted(record for record in self._records() if record[0]):
            yield key, slot

    def write(self, slot: int, key: BlockKey) -> None:
        self.RECORD.pack_into(self._memory, (1 + slot) * self.RECORD.size, next(self._written), *key)

    def erase(self, slot: int) -> None:
        self.RECORD.pack_into(self._memory, (1 + slot) * self.RECORD.size, 0, 0, b"")

    def _records(self) -> Iterable[tuple[int, int, BlockKey]]:
        for slot in range(self._num_slots):
            number, group, block_hash = self.RECORD.unpack_from(self._memory, (1 + slot) * self.RECORD.size)
            yield number, slot, (group, block_hash)


class DiskTier(Tier):
    """Files of blocks. Several engines may share the folder, and ranks delete the oldest files when it is full. So a
    file may be missing although its key is remembered: loading it then fails, and the block is recomputed."""

    def __init__(self, number: int, path_of: Callable[[BlockKey], Path], most_known: int = 1_000_000) -> None:
        """path_of: returns the file of a block on the first rank. most_known: how many keys of existing files to
        remember."""
        self.number = number
        self._path_of = path_of
        self._most_known = most_known
        self._known: dict[BlockKey, None] = {}  # the oldest first
        self._lock = threading.Lock()  # guards `_known`, which `look_up` changes
        self._being_written: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self._known)

    def has(self, key: BlockKey) -> bool:
        return key in self._known

    def look_up(self, keys: Iterable[BlockKey]) -> None:
        """Find out which blocks are on disk, up to the first missing one. It can be slow, so it is called on another
        thread."""
        for key in keys:
            if key not in self._known:
                if not self._path_of(key).exists():
                    return
                self._remember([key])

    def save(self, blocks: Mapping[BlockKey, int]) -> Transfer | None:
        keys = [key for key in blocks if key not in self._known and key not in self._being_written]
        self._being_written.update(keys)
        return Transfer(next(_numbers), self.number, False, [blocks[key] for key in keys], keys) if keys else None

    def load(self, blocks: Mapping[BlockKey, int]) -> Transfer:
        return Transfer(next(_numbers), self.number, True, list(blocks.values()), list(blocks))

    def ended(self, transfer: Transfer, failed: frozenset[int]) -> None:
        self._being_written.difference_update(() if transfer.is_load else transfer.keys)
        with self._lock:
            for place in failed:
                self._known.pop(transfer.keys[place], None)
        if not transfer.is_load:
            self._remember(key for place, key in enumerate(transfer.keys) if place not in failed)

    def _remember(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            self._known.update(dict.fromkeys(keys))
            while len(self._known) > self._most_known:
                del self._known[next(iter(self._known))]


def memory_slots(total: int, rank_bytes: Sequence[int]) -> int:
    """Return the number of slots in `total` bytes of CPU memory. rank_bytes: the bytes of one block on each rank."""
    return max(0, (total - SlotIndex.RECORD.size) // (sum(rank_bytes) + SlotIndex.RECORD.size))


def rank_region(num_slots: int, rank_bytes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return where the slots of a rank begin and end in the memory, after the index."""
    start = (1 + num_slots) * SlotIndex.RECORD.size + num_slots * sum(rank_bytes[:rank])
    return start, start + num_slots * rank_bytes[rank]


def block_path(folder: Path, rank: int, ranks: int, key: BlockKey) -> Path:
    """Return the file of a rank's part of a block. The hash differs for engines with other models, types or layouts."""
    group, block_hash = key
    name = block_hash.hex()
    return folder / f"rank-{rank}-of-{ranks}" / name[:2] / f"{name}-{group}.kv"
