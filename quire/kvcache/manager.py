"""Which blocks a request holds: prefix matching, allocation, and hashing of full blocks."""

from typing import Protocol

from quire.kvcache.block_pool import Block, BlockPool
from quire.kvcache.hashing import extend_hashes
from quire.kvcache.specs import KVCacheSpec
from quire.messages.step import BlockTableEdits


class Holder(Protocol):
    """What the manager knows of a request, and keeps on it (see scheduler/request.py)."""

    row: int
    token_ids: list[int]
    num_computed_tokens: int
    num_retired_tokens: int
    extra_keys: bytes
    block_tables: list[list[Block]]
    capacity: int
    block_hashes: list[bytes]
    num_hashed_blocks: int
    next_hash_at: int


class KVCacheManager:
    """Hands out the pool's blocks to requests, group by group."""

    def __init__(
        self,
        num_blocks: int,
        specs: list[KVCacheSpec],
        block_size: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.specs = specs
        self.block_size = block_size
        self.chunk = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self._windowed = any(spec.window is not None for spec in specs)

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of that length holds at most."""
        return sum(spec.max_blocks(num_tokens, self.chunk, self.block_size) for spec in self.specs)

    # ---- a request enters

    def admit(self, request: Holder, read_cache: bool = True) -> int | None:
        """Give the request the longest cached prefix of its tokens. The number of tokens that need no computing.

        At least one token is always left, for its logits; all of them if not `read_cache`. None, and nothing given, if
        there is no room for all its known tokens right now. Undone by `free`.
        """
        num_blocks = 0
        tables: list[list[Block]] = [[] for _ in self.specs]
        if self.enable_prefix_caching:
            extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        if self.enable_prefix_caching and read_cache:
            num_blocks, tables = self._match(request)
        in_use = sum(block.ref_cnt > 0 for table in tables for block in table)  # these take nothing from the free ones
        if self.max_blocks(len(request.token_ids)) - in_use > self.pool.num_free:
            return None
        for table in tables:
            for block in table:
                if block is not self.pool.null_block:
                    self.pool.share(block)
        request.block_tables = tables
        request.capacity = num_blocks * self.block_size
        request.num_hashed_blocks = num_blocks
        request.next_hash_at = (num_blocks + 1) * self.block_size
        return request.capacity

    def _match(self, request: Holder) -> tuple[int, list[list[Block]]]:
        """The longest prefix, in blocks, of which every group still has what the next query sees; and those blocks."""
        pool, specs = self.pool, self.specs
        hashes = request.block_hashes[: (len(request.token_ids) - 1) // self.block_size]
        tables: list[list[Block]] = [[] for _ in specs]
        length = len(hashes)
        for group, spec in enumerate(specs):
            if spec.window is None:
                tables[group] = pool.lookup_all(group, hashes[:length])
                length = len(tables[group])
        windowed = [(group, spec) for group, spec in enumerate(specs) if spec.window is not None]
        # Of a window, the last blocks are enough; where one is missing, no prefix that goes past it will do.
        while True:
            for group, spec in windowed:
                first = spec.first_needed_token(length * self.block_size) // self.block_size
                found = pool.lookup_all(group, reversed(hashes[first:length]))
                if len(found) < length - first:
                    length -= len(found) + 1
                    break
                tables[group] = [pool.null_block] * first + found[::-1]
            else:
                return length, [table[:length] for table in tables]

    # ---- a request grows

    def allocate(self, request: Holder, num_tokens: int, edits: BlockTableEdits) -> bool:
        """Slots for the request's first `num_tokens` tokens; block-table changes are appended to `edits`.

        False, and nothing changed but blocks that fell out of a window freed, if the pool has too few blocks.
        """
        if num_tokens <= request.capacity:
            return True
        if self._windowed:
            self._free_outside_windows(request)
        count = -(-num_tokens // self.block_size)
        have = request.capacity // self.block_size
        if (count - have) * len(self.specs) > self.pool.num_free:
            return False
        for group, table in enumerate(request.block_tables):
            for index in range(have, count):
                block = self.pool.take()
                table.append(block)
                edits.groups.append(group)
                edits.rows.append(request.row)
                edits.indices.append(index)
                edits.block_ids.append(block.block_id)
        request.capacity = count * self.block_size
        return True

    def write_tables(self, request: Holder, edits: BlockTableEdits) -> None:
        """Append the whole block tables of a request that was just given a row."""
        for group, table in enumerate(request.block_tables):
            edits.groups.extend([group] * len(table))
            edits.rows.extend([request.row] * len(table))
            edits.indices.extend(range(len(table)))
            edits.block_ids.extend([block.block_id for block in table])

    def _free_outside_windows(self, request: Holder) -> None:
        """Replace blocks that no present or later query sees by the null block. Tables of workers need no edit."""
        null = self.pool.null_block
        for spec, table in zip(self.specs, request.block_tables, strict=True):
            last = spec.first_needed_token(request.num_retired_tokens) // self.block_size
            index = min(last, len(table)) - 1
            freed = []
            while index >= 0 and table[index] is not null:
                freed.append(table[index])
                table[index] = null
                index -= 1
            self.pool.release(freed)

    # ---- hashes

    def hash_full_blocks(self, request: Holder) -> None:
        """Make findable the blocks that the request's submitted steps fill with known tokens.

        Called when the step is scheduled, so that later requests of the same step already share the blocks.
        """
        if not self.enable_prefix_caching:
            return
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        num_full = min(request.num_computed_tokens // self.block_size, len(request.block_hashes))
        for group, table in enumerate(request.block_tables):
            for index in range(request.num_hashed_blocks, num_full):
                if table[index] is not self.pool.null_block:
                    self.pool.remember(table[index], group, request.block_hashes[index])
        request.num_hashed_blocks = num_full
        request.next_hash_at = (num_full + 1) * self.block_size

    def withdraw_hashes(self, request: Holder, num_computed_tokens: int) -> None:
        """Forget the hashes of blocks that are full only since `num_computed_tokens`: their step never ran."""
        for table in request.block_tables:
            for block in table[num_computed_tokens // self.block_size : request.num_hashed_blocks]:
                if block is not self.pool.null_block:
                    self.pool.forget(block)

    # ---- a request leaves

    def free(self, request: Holder) -> None:
        for table in request.block_tables:
            self.pool.release(reversed(table))
        request.block_tables = []
        request.capacity = 0

    def reset_prefix_cache(self) -> None:
        """Forget all hashes; running requests keep their blocks."""
        self.pool.forget_all()
