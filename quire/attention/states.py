"""The states of recurrent layers in the cache: a page for each block and layer."""

import torch

from quire.attention.base import CacheBackend, StepLayout
from quire.kv.specs import StateShape
from quire.ops.reference.states import StatePlan


class StateBackend(CacheBackend):
    """Stores the pages that ops/reference/states.py defines. drafts: the maximum number of drafts of a request in a
    step."""

    name = "states"
    cache_dtype = torch.float32

    def __init__(self, shape: StateShape, block_size: int, drafts: int, capturable: bool = False) -> None:
        """capturable: whether the chosen ops can be captured in a CUDA graph."""
        self.shape = shape
        self.block_size = block_size
        self.drafts = drafts
        self.capturable = capturable
        self.block_shape = (shape.page_numbers(drafts),)

    @property
    def tokens_per_block(self) -> int:
        return self.block_size

    @property
    def layout(self) -> str:
        return f"{self.drafts} drafts"

    def plan(self, layout: StepLayout, previous: StatePlan | None = None) -> StatePlan:
        table = layout.block_table if layout.block_table.stride(1) == 1 else layout.block_table.contiguous()
        given = layout.query_start_loc.contiguous(), layout.seq_lens.contiguous(), table
        if previous is None:
            return StatePlan.of(*given, self.block_size, self.drafts, layout.tokens_per_request)
        previous.set(*given)
        return previous


def matching_block_size(block_size: int, state_bytes: int, token_bytes: int) -> int:
    """Return the number of tokens, a multiple of block_size, whose entries take as much memory as a state. With this
    block size, attention groups and state groups waste little of their blocks, which have the same size in bytes.

    token_bytes: the bytes that attention caches of a token in a layer, 0 for a model without attention.
    """
    if not token_bytes:
        return -(-_TOKENS_OF_A_STATE // block_size) * block_size
    return max(1, -(-state_bytes // (token_bytes * block_size))) * block_size


_TOKENS_OF_A_STATE = 512  # in a model without attention, the cost of a checkpoint does not depend on their distance
