"""Which blocks a request holds: prefix matching, allocation, and hashing of full blocks."""

from functools import partial
from typing import Protocol

from quire.kvcache.block_pool import Block, BlockPool
from quire.kvcache.hashing import extend_hashes, hash_root
from quire.kvcache.specs import KVCacheSpec
from quire.messages.step import BlockTableEdits


class Holder(Protocol):
    """What the manager knows of a request, and keeps on it (see scheduler/request.py)."""

    row: int
    token_ids: list[int]
    num_computed_tokens: int
    num_retired_tokens: int
    num_tokens_at_last_free: int
    extra_keys: dict[int, bytes]
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
        fingerprint: str = "",
    ) -> None:
        """fingerprint: see `hash_root`."""
        self.pool = BlockPool(num_blocks)
        self.specs = specs
        self.block_size = block_size
        self.chunk = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching and bool(specs)  # where nothing is kept, nothing is found
        self.root = hash_root(fingerprint)
        self._new_blocks = [spec.new_blocks for spec in specs]  # bound once, since they are called often
        self._full_blocks = [spec.full_blocks for spec in specs]
        # The groups in which a long request gives blocks back while it runs.
        self._freeing_groups = [group for group, spec in enumerate(specs) if spec.first_needed_token(1 << 30)]
        self._filled: list[tuple[Block, int, bytes]] = []  # (block, group, hash): see begin_step
        self._remember = [self.pool.remember if spec.sharable_at_once else self._remember_later for spec in specs]

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of that length holds at most."""
        return sum(spec.max_blocks(num_tokens, self.chunk, self.block_size) for spec in self.specs)

    def room(self, num_tokens: int) -> float:
        """Requests of that length that fit into the cache at once, if they share nothing."""
        return self.pool.num_usable / max(1, self.max_blocks(num_tokens))

    def kept_share(self, num_tokens: int) -> float:
        """The part of a request's blocks that holds entries which must be kept, from 0 to 1.

        The rest is spent on blocks that are not full, on groups with fewer entries than the largest, and on the tokens
        of steps in flight that windows have left behind.
        """
        places = max(len(spec.entries) for spec in self.specs)
        kept = sum(len(spec.entries) * spec.tokens_kept(num_tokens) for spec in self.specs)
        return kept / (self.max_blocks(num_tokens) * self.block_size * places)

    # ---- a request enters

    def admit(self, request: Holder, read_cache: bool = True) -> int | None:
        """Give the request the longest cached prefix of its tokens. The number of tokens that need no computing.

        At least one token is always left, for its logits; all of them if not `read_cache`. None, and nothing given, if
        there is no room for all its known tokens right now. Undone by `free`.
        """
        num_blocks = 0
        tables: list[list[Block]] = [[] for _ in self.specs]
        if self.enable_prefix_caching:
            extend_hashes(request.block_hashes, request.token_ids, self.block_size, self.root, request.extra_keys)
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
        """The longest prefix, in blocks, of which every group still has what the next query reads; and those blocks."""
        null, size = self.pool.null_block, self.block_size
        hashes = request.block_hashes[: (len(request.token_ids) - 1) // size]
        length = len(hashes)
        starts = [length + 1 for _ in self.specs]  # the first block of the group's prefix; beyond all: none found yet
        prefixes: list[list[Block]] = [[] for _ in self.specs]
        settled = False
        while not settled:
            settled = True
            for group, spec in enumerate(self.specs):
                if spec.first_needed_token(length * size) // size == starts[group]:
                    continue  # what was found for a longer prefix has all that this one needs
                lookup = partial(self.pool.lookup_all, group)
                starts[group], prefixes[group] = spec.cached_prefix(hashes[:length], size, lookup)
                if starts[group] + len(prefixes[group]) < length:
                    length = starts[group] + len(prefixes[group])
                    settled = False
        found = zip(starts, prefixes, strict=True)
        return length, [[null] * start + blocks[: length - start] for start, blocks in found]

    # ---- a request grows

    def allocate(self, request: Holder, num_tokens: int, edits: BlockTableEdits) -> bool:
        """Slots for the request's first `num_tokens` tokens; block-table changes are appended to `edits`.

        False if the pool has too few blocks; then nothing has changed, except that unneeded blocks have been freed.
        """
        if num_tokens <= request.capacity:
            return True
        if self._freeing_groups:
            self._free_unneeded(request)
        pool, size, tables = self.pool, self.block_size, request.block_tables
        capacity = -(-num_tokens // size) * size
        ranges = []
        num_new = 0
        for new_blocks, table in zip(self._new_blocks, tables, strict=True):
            indices = new_blocks(len(table), capacity, size)
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
        request.capacity = capacity
        return True

    def write_tables(self, request: Holder, edits: BlockTableEdits) -> None:
        """Append the whole block tables of a request that was just given a row."""
        for group, table in enumerate(request.block_tables):
            edits.groups.extend([group] * len(table))
            edits.rows.extend([request.row] * len(table))
            edits.indices.extend(range(len(table)))
            edits.block_ids.extend([block.block_id for block in table])

    def _free_unneeded(self, request: Holder) -> None:
        """Replace blocks that no present or later query reads by the null block. Tables of workers need no edit."""
        null, size, retired = self.pool.null_block, self.block_size, request.num_retired_tokens
        for group in self._freeing_groups:
            spec, table = self.specs[group], request.block_tables[group]
            first = spec.first_needed_token(request.num_tokens_at_last_free) // size
            last = spec.first_needed_token(retired) // size
            if first < last:
                unneeded = table[first:last]
                table[first:last] = [null] * len(unneeded)
                self.pool.release(reversed(unneeded))
        request.num_tokens_at_last_free = retired

    # ---- hashes

    def hash_full_blocks(self, request: Holder) -> None:
        """Make findable the blocks that the request's submitted steps fill with known tokens.

        Called when the step is scheduled, so that later requests of the same step already share the blocks.
        """
        if not self.enable_prefix_caching:
            return
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, self.root, request.extra_keys)
        null, size, hashes, first = (
            self.pool.null_block,
            self.block_size,
            request.block_hashes,
            request.num_hashed_blocks,
        )
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        for group, table in enumerate(request.block_tables):
            for index in self._full_blocks[group](first, num_tokens, size):
                if table[index] is not null:
                    self._remember[group](table[index], group, hashes[index])
        num_full = num_tokens // size
        request.num_hashed_blocks = num_full
        request.next_hash_at = (num_full + 1) * self.block_size

    def _remember_later(self, block: Block, group: int, block_hash: bytes) -> None:
        self._filled.append((block, group, block_hash))

    def begin_step(self) -> None:
        """Make findable the blocks that only the steps after the one that fills them may share."""
        for block, group, block_hash in self._filled:
            self.pool.remember(block, group, block_hash)
        self._filled.clear()

    def withdraw_hashes(self, request: Holder, num_computed_tokens: int) -> None:
        """Forget the hashes of blocks that are full only since `num_computed_tokens`: their step never ran."""
        self._filled.clear()  # it names blocks of the newest step alone, which is withdrawn before all others
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
        self._filled.clear()
        self.pool.forget_all()
