"""Two KV specs that no model uses yet, to test the interface: a recurrent state, and blocks that differ by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.kvcache.block_pool import Block
from quire.kvcache.specs import KVCacheSpec, Lookup

if TYPE_CHECKING:
    from quire.kvcache.specs import Ints


class StateSpec(KVCacheSpec, frozen=True, tag=True):
    """A recurrent layer's state, which has a fixed size.

    A step reads the state of the step before, and stores its own in the block of its last token. If a step ended with
    the last token of a block, that block is a checkpoint from which other requests may start. num_blocks: one for the
    state that is read, and one for each step in flight.
    """

    num_blocks: int

    # A step reads states before it stores any.
    sharable_at_once: ClassVar[bool] = False

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return min(-(-num_tokens // block_size), self.num_blocks)

    def new_blocks(self, table_length: int, num_tokens: int, block_size: int) -> range:
        end = -(-num_tokens // block_size)
        return range(max(table_length, end - 1), end)

    def full_blocks(self, first: int, num_tokens: int, block_size: int) -> range:
        if num_tokens % block_size:
            return range(0)
        end = num_tokens // block_size
        return range(max(first, end - 1), end)


class HeadBudgetSpec(KVCacheSpec, frozen=True, tag=True):
    """Each KV head keeps as many tokens as its budget allows, in blocks of its own.

    The worker decides which tokens a head keeps (in this test the last ones, in a ring). The scheduler only grants
    blocks. A table lists the first block of each head, then the second block of each head that has one, and so on.
    Which tokens a head keeps depends on later tokens, so blocks cannot be shared. budgets: tokens of each head, in full
    blocks.
    """

    budgets: tuple[int, ...]

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return 0

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return sum(-(-min(num_tokens, budget) // block_size) for budget in self.budgets)

    def new_blocks(self, table_length: int, num_tokens: int, block_size: int) -> range:
        return range(table_length, self.max_blocks(num_tokens, 0, block_size))

    def full_blocks(self, first: int, num_tokens: int, block_size: int) -> range:
        return range(0)

    def cached_prefix(self, hashes: Sequence[bytes], block_size: int, lookup: Lookup) -> tuple[int, list[Block]]:
        return 0, []

    def index(self, head: int, number: int, block_size: int) -> int:
        """The index in a table of block `number` of a head."""
        lengths = [budget // block_size for budget in self.budgets]
        return sum(min(number, length) for length in lengths) + sum(length > number for length in lengths[:head])

    def slots(self, tables: Ints, rows: Ints, positions: Ints, block_size: int) -> Ints:
        """As in the interface, with an axis for heads: [..., tokens, heads]."""
        import numpy as np

        result = np.zeros((*tables.shape[:-2], len(positions), len(self.budgets)), positions.dtype)
        for head, budget in enumerate(self.budgets):
            numbers, offsets = divmod(positions % budget, block_size)
            indices = np.array([self.index(head, int(number), block_size) for number in numbers])
            result[..., head] = tables[..., rows, indices] * block_size + offsets
        return result
