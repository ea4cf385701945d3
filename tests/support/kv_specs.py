"""A KV spec that no model uses yet, to test the interface: blocks that differ by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.kv.block_pool import Block
from quire.kv.specs import KVCacheSpec, Lookup

if TYPE_CHECKING:
    from quire.kv.specs import Ints


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
