"""The contents of the KV cache's tiers, and the transfers to and from them."""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from quire.kv.tiers import DiskTier, MemoryTier
from quire.kv.transfers import Transfers
from quire.messages.transfers import BlockKey, Transfer

MOST_CELLS = 1024  # in the map of a tier
_FREE, _FILLED, _SAVED, _LOADED = range(4)


class TierView(msgspec.Struct, omit_defaults=True):
    """Counts of a tier's blocks. filled: known to be stored. most: the capacity, 0 if unknown. saving and loading: in
    transfer.

    saved, loaded, failed: ended transfers since recording began. left: evicted blocks. cells: one character for each
    part of the tier: "0" free, "1" filled, "2" being saved, "3" being loaded; a part with several blocks shows the
    highest.
    """

    kind: str
    filled: int
    most: int = 0
    saving: int = 0
    loading: int = 0
    saved: int = 0
    loaded: int = 0
    failed: int = 0
    left: int = 0
    cells: str = ""


class TierWatch:
    """Counts a tier's transfers from its creation until `end`."""

    def __init__(self, tier: MemoryTier | DiskTier) -> None:
        self._tier = tier
        self._saved = self._loaded = self._failed = self._left = 0
        self._ended = tier.ended
        tier.ended = self._count  # type: ignore[method-assign]  # hides the method of the class
        self._states = np.zeros(0, np.uint8)
        if isinstance(tier, MemoryTier):
            self._give_up = tier.give_up
            tier.give_up = self._leave  # type: ignore[method-assign]
            self._states = np.zeros(tier.num_slots, np.uint8)
            self._states[list(tier.slots.values())] = _FILLED

    def end(self) -> None:
        del self._tier.ended
        if isinstance(self._tier, MemoryTier):
            del self._tier.give_up

    def _count(self, transfer: Transfer, failed: frozenset[int]) -> None:
        self._ended(transfer, failed)
        num_moved = len(transfer.keys) - len(failed)
        self._failed += len(failed)
        if transfer.is_load:
            self._loaded += num_moved
        else:
            self._saved += num_moved
            self._states[[slot for i, slot in enumerate(transfer.slots) if i not in failed]] = _FILLED

    def _leave(self, key: BlockKey) -> None:
        assert isinstance(self._tier, MemoryTier)
        self._left += 1
        self._states[self._tier.slots[key]] = _FREE
        self._give_up(key)

    def view(self, moving: Iterable[Transfer]) -> TierView:
        """moving: the transfers in progress, to and from all tiers."""
        tier = self._tier
        counts = [0, 0]
        states = self._states.copy()
        for transfer in moving:
            if transfer.tier == tier.number:
                counts[transfer.is_load] += len(transfer.keys)
                states[transfer.slots] = _LOADED if transfer.is_load else _SAVED
        kind, most = ("memory", tier.num_slots) if isinstance(tier, MemoryTier) else ("disk", 0)
        saving, loading = counts
        return TierView(
            kind, len(tier), most, saving, loading, self._saved, self._loaded, self._failed, self._left, _cells(states)
        )


def watch_tiers(transfers: Transfers | None) -> list[TierWatch]:
    tiers = () if transfers is None else transfers.tiers
    return [TierWatch(tier) for tier in tiers if isinstance(tier, MemoryTier | DiskTier)]


def views(watches: Iterable[TierWatch], transfers: Transfers | None) -> list[TierView]:
    orders = [] if transfers is None else [moving.order for moving in transfers.moving.values()]
    return [watch.view(orders) for watch in watches]


def _cells(states: "np.ndarray[Any, np.dtype[np.uint8]]") -> str:
    if not len(states):
        return ""
    starts = np.arange(0, len(states), -(-len(states) // MOST_CELLS))
    return (np.maximum.reduceat(states, starts) + ord("0")).tobytes().decode()
