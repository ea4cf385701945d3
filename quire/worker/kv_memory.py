"""The memory of a rank's KV cache."""

import torch

from quire.ops.memory import empty


class KVMemory:
    """All blocks of one rank, as bytes. Block 0, the null block, is zero.

    blocks: uint8 [num_blocks, block_bytes]. Entry j of a KV group lies at j * entry_bytes of the group's blocks.
    """

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        # Not filled: nothing is read that was not stored, and memory that was never touched costs nothing. Except for
        # the null block: backends read it where a window has passed. It weighs nothing there, but 0 * NaN is NaN.
        self.blocks = empty(num_blocks, block_bytes, dtype=torch.uint8, device=device)
        self.blocks[0].zero_()
