"""A model of what copies blocks between the pool and its tiers, for the scheduler's property tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quire.kv.tiers import DiskTier, MemoryTier, Tier
from quire.kv.transfers import Transfers
from quire.messages.transfers import BlockKey, Transfer

Entry = tuple[int, int]
Memory = dict[tuple[int, int], Entry]  # (block, offset) -> what is stored there


@dataclass
class File:
    """The file of a block, which exists or does not."""

    mover: MoverModel
    key: BlockKey

    def exists(self) -> bool:
        return any(self.key in content for content in self.mover.contents.values())


class AtOnce:
    """Runs what it is given at once, instead of on a thread."""

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(work(*arguments))
        return done


class MoverModel:
    """Copies when it is told to. Until then, a target holds garbage, and a source must not change.

    contents: by tier, and by slot or key, what is stored there by offset.
    """

    def __init__(self, memory: Memory, block_size: int, seed: int) -> None:
        self.memory, self.block_size, self.dice = memory, block_size, random.Random(seed)
        self.pending: list[tuple[Transfer, Future[list[int]], list[dict[int, Entry]]]] = []
        self.contents: dict[int, dict[Any, dict[int, Entry]]] = {}
        self.failures = self.loads = 0

    def tiers(self, kinds: str) -> list[Tier]:
        made: list[Tier] = []
        if kinds in ("memory", "both"):
            made.append(MemoryTier(0, 12))
        if kinds in ("disk", "both"):
            made.append(DiskTier(len(made), lambda key: File(self, key), most_known=9))  # type: ignore[arg-type,return-value]
        self.contents = {tier.number: {} for tier in made}
        return made

    def attach(self, transfers: Transfers) -> None:
        self.transfers = transfers
        transfers._searcher = AtOnce()  # type: ignore[assignment]

    def transfer(self, order: Transfer) -> Future[list[int]]:
        future: Future[list[int]] = Future()
        sources = [self.block(block_id) for block_id in order.block_ids]
        if order.is_load:
            for block_id in order.block_ids:
                self.memory.update({(block_id, offset): (-2, -2) for offset in range(self.block_size)})
        self.pending.append((order, future, sources))
        return future

    def block(self, block_id: int) -> dict[int, Entry]:
        places = ((offset, self.memory.get((block_id, offset))) for offset in range(self.block_size))
        return {offset: entry for offset, entry in places if entry is not None}

    def end_one(self) -> None:
        """End a transfer. One block in eight cannot be copied, and one file in eight has been deleted."""
        order, future, sources = self.pending.pop(self.dice.randrange(len(self.pending)))
        content, failed = self.contents[order.tier], []
        for index, (block_id, key) in enumerate(zip(order.block_ids, order.keys, strict=True)):
            place = order.slots[index] if order.slots else key
            if not order.slots and self.dice.random() < 0.12:
                content.pop(place, None)
            if self.dice.random() < 0.12 or (order.is_load and place not in content):
                failed.append(index)
            elif order.is_load:
                self.memory.update({(block_id, offset): entry for offset, entry in content[place].items()})
            else:
                assert self.block(block_id) == sources[index], "a block changed while it was saved"
                content[place] = sources[index]
        self.failures += len(failed)
        self.loads += order.is_load * (len(order.keys) - len(failed))
        future.set_result(failed)

    def held(self) -> list[int]:
        """The blocks that transfers hold, and those that requests hold which wait for them."""
        moving = list(self.transfers.moving.values())
        loads = {id(moving.load): moving.load for moving in moving if moving.load is not None}
        parts = [part for load in loads.values() for part in load.transfers]
        saves = [moving for moving in moving if moving.load is None]
        blocks = [block for part in (*parts, *saves) for block in part.held]
        return [block.block_id for block in (*blocks, *(b for load in loads.values() for b in load.held))]
