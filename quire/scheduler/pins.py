"""Pinned prefixes, whose blocks are never evicted from the KV cache."""

from quire.kv.hashing import request_keys
from quire.kv.manager import KVCacheManager
from quire.messages.changes import PinPrefix
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.scheduler.request import Request


class PinnedPrefixes:
    """Holds on blocks of the prefix cache, by prefix id. A hold is a request that was assigned its cached blocks but is
    never scheduled, so its blocks are treated like those of any request."""

    def __init__(self, kv: KVCacheManager, most_blocks: int) -> None:
        """most_blocks: the limit for all prefixes together."""
        self._kv = kv
        self._most_blocks = most_blocks
        self._held: dict[str, Request] = {}

    def pin(self, order: PinPrefix) -> None:
        """Pin the full blocks of a prefix that has just been computed. Raises ValueError if that is impossible."""
        kv = self._kv
        size = self._kv.block_size
        if not kv.enable_prefix_caching:
            raise ValueError("prefixes cannot be pinned without enable_prefix_caching")
        wanted = len(order.token_ids) // size * size
        if not wanted:
            raise ValueError(f"a prefix of {len(order.token_ids)} tokens is shorter than a block of {size}")
        self.unpin(order.id)
        token_ids = [*order.token_ids, 0]  # a request must have at least one token left to compute
        source = EngineCoreRequest(order.id, token_ids, SamplingParams(), 0, 0)
        source.cache_salt = order.cache_salt
        source.adapter = order.adapter
        holder = Request(source, (0, 0.0, 0), request_keys(size, source))
        if kv.admit(holder) != wanted:
            kv.free(holder)
            raise ValueError("the cache has no room for the prefix now; try again when fewer requests run")
        self._held[order.id] = holder
        if (count := self._count()) > self._most_blocks:
            self.unpin(order.id)
            raise ValueError(
                f"pinned prefixes would take {count} blocks of the cache, and may take {self._most_blocks}; delete "
                "some, pin a shorter one, or raise pinned_prefix_share"
            )

    def unpin(self, prefix_id: str) -> None:
        holder = self._held.pop(prefix_id, None)
        if holder is not None:
            self._kv.free(holder)

    def clear(self) -> None:
        for prefix_id in list(self._held):
            self.unpin(prefix_id)

    def _count(self) -> int:
        tables = [table for holder in self._held.values() for table in holder.blocks.tables]
        return len({block.block_id for table in tables for block in table} - {0})
