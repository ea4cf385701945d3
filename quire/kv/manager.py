"""Manages the blocks of each request: prefix matching, allocation, and hashing of full blocks."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, Protocol

from quire.kv.block_pool import Block, BlockPool, HashedTokens
from quire.kv.hashing import extend_hashes, hash_root
from quire.kv.specs import CrossAttentionSpec, KVCacheSpec
from quire.messages.engine import EngineCoreRequest
from quire.messages.step import BlockTableEdits


class RequestBlocks:
    """The blocks of a request. Written by the KV cache manager."""

    __slots__ = ("capacity", "next_hash_at", "num_hashed", "num_removed_tokens", "num_tokens_at_last_free", "tables")

    def __init__(self) -> None:
        self.tables: list[list[Block]] = []  # one for each KV group
        self.capacity = 0  # tokens that the tables have slots for
        self.num_removed_tokens = 0  # tokens in the blocks that compression has removed
        self.num_tokens_at_last_free = 0  # retired tokens when unneeded blocks were last freed
        self.num_hashed = 0
        self.next_hash_at = 0  # number of computed tokens at which the next block is full


class KnownTokens(HashedTokens, Protocol):
    """Tokens whose cached blocks the manager looks up."""

    extra_keys: dict[int, bytes]


class Holder(KnownTokens, Protocol):
    """The attributes of a request that the manager reads (see scheduler/request.py). It writes to `blocks`, and to
    `block_hashes`."""

    request_id: str
    source: EngineCoreRequest
    row: int
    num_computed_tokens: int
    num_retired_tokens: int
    blocks: RequestBlocks

    @property
    def is_compressed(self) -> bool: ...


class KVCacheManager:
    """Hands out the pool's blocks to requests, group by group."""

    def __init__(
        self,
        num_blocks: int,
        specs: list[KVCacheSpec],
        block_size: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        fingerprint: str = "",
    ) -> None:
        """fingerprint: see `hash_root`."""
        self.pool = BlockPool(num_blocks)
        self.specs = specs
        self.block_size = block_size
        self.chunk = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching and bool(specs)  # a model without specs caches nothing
        self.root = hash_root(fingerprint)
        self._new_blocks = [spec.new_blocks for spec in specs]  # bound once, since they are called often
        self._full_blocks = [spec.full_blocks for spec in specs]
        # The groups that free blocks while a long request runs.
        self._freeing_groups = [group for group, spec in enumerate(specs) if spec.first_needed_token(1 << 30)]
        self._cross_groups = [group for group, spec in enumerate(specs) if isinstance(spec, CrossAttentionSpec)]
        self._most_crossed = sum(specs[group].max_blocks(0, 0, block_size) for group in self._cross_groups)
        self._filled: list[tuple[Block, int, Holder, int]] = []  # arguments of `remember`: see end_step
        self._remember = [self.pool.remember if spec.sharable_at_once else self._remember_later for spec in specs]

    def max_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens can hold."""
        return sum(spec.max_blocks(num_tokens, self.chunk, self.block_size) for spec in self.specs)

    def check_room(self, max_model_len: int) -> None:
        """Raises ValueError if the longest request does not fit into the cache."""
        if self.max_blocks(max_model_len) > self.pool.num_usable:
            raise ValueError(
                f"a request of max_model_len={max_model_len} tokens needs {self.max_blocks(max_model_len)} KV blocks, "
                f"but there are {self.pool.num_usable}; lower max_model_len or raise kv_cache_memory_bytes"
            )

    def room(self, num_tokens: int) -> float:
        """Return how many requests of `num_tokens` tokens fit into the cache at once if they share no blocks."""
        return self.pool.num_usable / max(1, self.max_blocks(num_tokens))

    def kept_share(self, num_tokens: int) -> float:
        """Return the fraction of a request's blocks, from 0 to 1, that holds entries still needed.

        The rest is lost to partially filled blocks, to groups with fewer entries than the largest group, and to tokens
        that have left a window while their step is in flight.
        """
        most_entries = max(len(spec.entries) for spec in self.specs)
        kept = sum(len(spec.entries) * spec.tokens_kept(num_tokens, self.block_size) for spec in self.specs)
        return kept / (self.max_blocks(num_tokens) * self.block_size * most_entries)

    # ---- a request enters

    def admit(self, request: Holder, read_cache: bool = True, num_spared: int = 0) -> int | None:
        """Assign the longest cached prefix of its tokens to the request. Returns the number of tokens in that prefix.

        At least one token is always left to compute, for its logits; without `read_cache`, all tokens are. Returns None
        without assigning blocks if there is currently no room for all known tokens. `free` undoes this. num_spared:
        free blocks to reserve for other requests.
        """
        num_blocks = 0
        tables: list[list[Block]] = [[] for _ in self.specs]
        if self.enable_prefix_caching and read_cache:
            num_blocks, tables = self.find(request, self.pool.lookup_all)
        if not self.has_room(request, chain(*tables), num_spared):
            return None
        for table in tables:
            for block in table:
                if block is not self.pool.null_block:
                    self.pool.share(block)
        for group in self._cross_groups:
            tables[group] = [self.pool.take() for _ in range(self._cross_blocks(request))]
        blocks = request.blocks
        blocks.tables = tables
        blocks.capacity = num_blocks * self.block_size
        blocks.num_hashed = num_blocks
        blocks.next_hash_at = sys.maxsize if request.is_compressed else (num_blocks + 1) * self.block_size
        return blocks.capacity

    def has_room(self, request: KnownTokens, found: Iterable[Block], num_spared: int = 0) -> bool:
        """Whether there are enough free blocks for all known tokens of the request, not counting `num_spared`. found:
        cached blocks of its prefix."""
        in_use = sum(block.ref_cnt > 0 for block in found)  # sharing these takes no free block
        return self.needed_blocks(request) - in_use <= self.pool.num_free - num_spared

    def needed_blocks(self, request: KnownTokens) -> int:
        """Return the most blocks that the known tokens of the request need."""
        crossed = len(self._cross_groups) * self._cross_blocks(request)
        return self.max_blocks(len(request.token_ids)) - self._most_crossed + crossed

    def _cross_blocks(self, request: KnownTokens) -> int:
        """Return the number of cross-attention blocks for the request's encoder tokens."""
        return -(-request.source.crossed // self.block_size)

    def find(
        self, request: KnownTokens, lookup_all: Callable[[int, Iterable[bytes]], list[Any]]
    ) -> tuple[int, list[Any]]:
        """Return the length of the longest cached prefix, in blocks, and its block table for each group. Every group
        still has the blocks that the query after the prefix reads.

        lookup_all: returns a group's blocks with these hashes, up to the first hash without a block.
        """
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, self.root, request.extra_keys)
        null = self.pool.null_block
        size = self.block_size
        hashes = request.block_hashes[: (len(request.token_ids) - 1) // size]
        length = len(hashes)
        # For each group, the index of the first block that was found; past the end if none was.
        starts = [length + 1 for _ in self.specs]
        prefixes: list[list[Any]] = [[] for _ in self.specs]
        settled = False
        while not settled:
            settled = True
            for group, spec in enumerate(self.specs):
                if spec.first_needed_token(length * size) // size == starts[group]:
                    continue  # the blocks found for a longer prefix include all that this prefix needs
                lookup = partial(lookup_all, group)
                starts[group], prefixes[group] = spec.cached_prefix(hashes[:length], size, lookup)
                if starts[group] + len(prefixes[group]) < length:
                    length = starts[group] + len(prefixes[group])
                    settled = False
        found = zip(starts, prefixes, strict=True)
        return length, [[null] * start + blocks[: length - start] for start, blocks in found]

    # ---- a request grows

    def allocate(self, request: Holder, num_tokens: int, edits: BlockTableEdits) -> bool:
        """Allocate slots for the request's first `num_tokens` tokens, and append block-table changes to `edits`.

        Returns False if the pool has too few blocks; then the only change is that unneeded blocks were freed.
        """
        blocks = request.blocks
        if num_tokens <= blocks.capacity:
            return True
        if self._freeing_groups:
            self._free_unneeded(request)
        pool = self.pool
        size = self.block_size
        tables = blocks.tables
        capacity = -(-num_tokens // size) * size
        ranges = []
        num_new = 0
        for new_blocks, table in zip(self._new_blocks, tables, strict=True):
            indices = new_blocks(len(table), capacity - blocks.num_removed_tokens, size)
            ranges.append(indices)
            num_new += len(indices)
        if num_new > pool.free_list.length:
            return False
        for group, indices in enumerate(ranges):
            table = tables[group]
            if indices.start > len(table):
                table.extend([pool.null_block] * (indices.start - len(table)))
            for index in indices:
                block = pool.take()
                table.append(block)
                edits.groups.append(group)
                edits.rows.append(request.row)
                edits.indices.append(index)
                edits.block_ids.append(block.block_id)
        blocks.capacity = capacity
        return True

    def write_tables(self, request: Holder, edits: BlockTableEdits) -> None:
        """Append to `edits` the complete block tables of a request that has just been assigned a row."""
        for group, table in enumerate(request.blocks.tables):
            edits.groups.extend([group] * len(table))
            edits.rows.extend([request.row] * len(table))
            edits.indices.extend(range(len(table)))
            edits.block_ids.extend([block.block_id for block in table])

    def drop_blocks(self, request: Holder, first: int, last: int) -> None:
        """Free the blocks first, ..., last - 1 of a compressed request. They are removed from its table, so later
        tokens have lower indices than their positions imply."""
        for table in request.blocks.tables:
            self.pool.release(reversed(table[first:last]))
            del table[first:last]
        request.blocks.num_removed_tokens += (last - first) * self.block_size

    def _free_unneeded(self, request: Holder) -> None:
        """Replace blocks that no query reads any more with the null block. The workers' tables need no edit."""
        null = self.pool.null_block
        size = self.block_size
        retired = request.num_retired_tokens
        blocks = request.blocks
        for group in self._freeing_groups:
            spec = self.specs[group]
            table = blocks.tables[group]
            first = spec.first_needed_token(blocks.num_tokens_at_last_free) // size
            last = spec.first_needed_token(retired) // size
            if first < last:
                unneeded = table[first:last]
                table[first:last] = [null] * len(unneeded)
                self.pool.release(reversed(unneeded))
        blocks.num_tokens_at_last_free = retired

    # ---- hashes

    def hash_full_blocks(self, request: Holder) -> None:
        """Make blocks findable once the request's submitted steps fill them with known tokens.

        Called when the step is scheduled, so that later requests of the same step can already share the blocks.
        """
        if not self.enable_prefix_caching:
            return
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, self.root, request.extra_keys)
        null = self.pool.null_block
        size = self.block_size
        blocks = request.blocks
        first = blocks.num_hashed
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        for group, table in enumerate(blocks.tables):
            for index in self._full_blocks[group](first, num_tokens, size):
                if table[index] is not null:
                    self._remember[group](table[index], group, request, index)
        num_full = num_tokens // size
        blocks.num_hashed = num_full
        blocks.next_hash_at = (num_full + 1) * self.block_size

    def _remember_later(self, block: Block, group: int, request: Holder, index: int) -> None:
        self._filled.append((block, group, request, index))

    def end_step(self) -> None:
        """Called when a step is complete: make its filled blocks findable in groups where only later steps may share
        them."""
        for filled in self._filled:
            self.pool.remember(*filled)
        self._filled.clear()

    def withdraw_hashes(self, request: Holder, num_computed_tokens: int) -> None:
        """Forget the hashes of the request's blocks beyond `num_computed_tokens`, because the step that would have
        filled them never ran."""
        blocks = request.blocks
        for table in blocks.tables:
            for block in table[num_computed_tokens // self.block_size : blocks.num_hashed]:
                if block is not self.pool.null_block:
                    self.pool.forget(block)

    # ---- a request leaves

    def free(self, request: Holder) -> None:
        blocks = request.blocks
        for table in blocks.tables:
            self.pool.release(reversed(table))
        blocks.tables = []
        blocks.capacity = 0
        blocks.num_removed_tokens = 0

    def change_root(self, root: bytes, requests: Iterable[KnownTokens]) -> None:
        """Change the root of the hashes of later blocks, as for another model. requests: all requests that may have
        hashes."""
        self.root = root
        for request in requests:
            request.block_hashes.clear()

    def reset_prefix_cache(self, external: bool = False) -> None:
        """Forget all hashes. Running requests keep their blocks. external: also change later hashes, so that blocks
        stored outside the pool are not found."""
        if external:
            self.root = hash_root(self.root.hex())
        self.pool.forget_all()
