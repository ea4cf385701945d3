"""The pool of KV blocks: reference counts, the free list, and the map from hashes to blocks."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, overload

from quire.messages.engine import EngineCoreRequest

NULL_BLOCK_ID = 0  # the table entry of tokens without a block (outside a window); padding may write to this block


class Block:
    """A block of the cache. It is in the free list while ref_cnt is 0, and keeps its hash there until eviction."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: tuple[int, bytes] | None = None  # (KV group, hash)
        self.prev: Block | None = None
        self.next: Block | None = None


class Blocks(Sequence[Block]):
    """All blocks, by id. Each becomes an object on first access: a cache may have hundreds of thousands."""

    def __init__(self, number: int) -> None:
        self._blocks: list[Block | None] = [None] * number

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Block: ...

    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...

    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        block = self._blocks[index]
        if block is None:
            block = self._blocks[index] = Block(range(len(self))[index])
        return block


class FreeList:
    """An intrusive doubly-linked list: take from the front, put at either end, remove from anywhere, all in O(1).

    head <-> blocks without a hash <-> never taken <-> least recently freed <-> ... <-> most recently freed <-> tail

    The blocks that were never taken are those from the id `_unused` on. One node stands for all of them, except for the
    null block, which is never free.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._unused = NULL_BLOCK_ID + 1
        self._never_taken = Block(-1)
        self._head, self._tail = Block(-1), Block(-1)
        self._head.next = self._tail
        self._tail.prev = self._head
        self.length = 0
        if len(blocks) > self._unused:
            self.append(self._never_taken)
            self.length = len(blocks) - self._unused

    def append(self, block: Block) -> None:
        assert self._tail.prev is not None
        self._insert(self._tail.prev, block, self._tail)

    def appendleft(self, block: Block) -> None:
        assert self._head.next is not None
        self._insert(self._head, block, self._head.next)

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        before.next = after.prev = block
        block.prev = before
        block.next = after
        self.length += 1

    def remove(self, block: Block) -> None:
        before = block.prev
        after = block.next
        assert before is not None
        assert after is not None
        before.next = after
        after.prev = before
        block.prev = block.next = None
        self.length -= 1

    def popleft(self) -> Block:
        assert self.length, "the free list is empty"
        first = self._head.next
        assert first is not None
        if first is self._never_taken:
            return self._first_unused()
        self.remove(first)
        return first

    def _first_unused(self) -> Block:
        block = self._blocks[self._unused]
        self._unused += 1
        if self._unused == len(self._blocks):
            self.remove(self._never_taken)
        else:
            self.length -= 1
        return block

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not self._tail:
            assert block is not None
            if block is self._never_taken:
                yield from self._blocks[self._unused :]
            else:
                yield block
            block = block.next


class HashedTokens(Protocol):
    """Tokens and the hashes of their full blocks: block_hashes[i] covers block i and all tokens before it."""

    source: EngineCoreRequest
    token_ids: list[int]
    block_hashes: list[bytes]


class BlockListener(Protocol):
    """A listener that keeps track of the blocks that can be found by their hash.

    A block counts as stored when the step that fills it is scheduled; its content is complete once that step has run.
    If the step is withdrawn, the block is removed again. A block is removed before it is reused for other content.
    """

    def on_stored(self, group: int, tokens: HashedTokens, index: int, block_id: int) -> None:
        """The block can be found by tokens.block_hashes[index]."""

    def on_removed(self, group: int, block_hash: bytes, block_id: int) -> None: ...

    def on_cleared(self) -> None:
        """No block can be found any more."""


class BlockPool:
    """`num_blocks` blocks, of which block 0 is the null block and is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = Blocks(num_blocks)
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.free_list = FreeList(self.blocks)
        self.listeners: list[BlockListener] = []
        self._cached: dict[tuple[int, bytes], Block] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that can be handed out, including cached blocks that no request uses."""
        return self.free_list.length

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    def lookup(self, group: int, block_hash: bytes) -> Block | None:
        """Return the block with this hash."""
        return self._cached.get((group, block_hash))

    def lookup_all(self, group: int, block_hashes: Iterable[bytes]) -> list[Block]:
        """Return the blocks with these hashes, up to the first hash without a block."""
        cached = self._cached
        found = []
        for block_hash in block_hashes:
            block = cached.get((group, block_hash))
            if block is None:
                break
            found.append(block)
        return found

    def take(self) -> Block:
        """Hand out a free block: one without a hash if there is one, otherwise evict the least recently freed one. The
        caller must check num_free first."""
        block = self.free_list.popleft()
        if block.block_hash is not None:
            self.forget(block)
        block.ref_cnt = 1
        return block

    def share(self, block: Block) -> None:
        """Add a user to a cached block."""
        if block.ref_cnt == 0:
            self.free_list.remove(block)
        block.ref_cnt += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Remove one user from each block. Pass the blocks of a request last-first, so that its tail is evicted before
        the head that other requests share.

        A free block without a hash is the next to be taken, since its memory is warm.
        """
        for block in blocks:
            if block is self.null_block:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (self.free_list.appendleft if block.block_hash is None else self.free_list.append)(block)

    def remember(self, block: Block, group: int, tokens: HashedTokens, index: int) -> None:
        """Make the block findable by tokens.block_hashes[index]. If another block already has the hash, nothing
        changes."""
        key = (group, tokens.block_hashes[index])
        if block.block_hash is None and self._cached.setdefault(key, block) is block:
            block.block_hash = key
            for listener in self.listeners:
                listener.on_stored(group, tokens, index, block.block_id)

    def forget(self, block: Block) -> None:
        """Make the block unfindable by its hash. Its users keep it."""
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            for listener in self.listeners:
                listener.on_removed(*block.block_hash, block.block_id)
            block.block_hash = None

    def forget_all(self) -> None:
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        for listener in self.listeners:
            listener.on_cleared()
