"""The memory of a rank's KV cache. Blocks can be copied, read and written as bytes."""

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.ops.memory import upload, zeros


class KVMemory:
    """All blocks of one rank, as bytes. Block 0, the null block, is zero and belongs to no request.

    blocks: uint8 [num_blocks, block_bytes]. KVCacheSpec.starts returns the places of a KV group's entries. If blocks
    are divided into parts, one for each entry, it is [num_blocks, parts, bytes of a part], and the memory holds the
    first part of all blocks, then the second part of all blocks, and so on. The parts of a block, one after the other,
    are the bytes of the undivided block.

    Copies, reads and writes are ordered with the steps. They see the stores of all steps submitted before them, even if
    the device has not run these steps yet. All steps submitted after them see their writes. So copy a block before
    submitting the step that stores into the copy. A source may go back to the pool as soon as the call returns. Call
    these methods from the thread that submits the steps.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, device: torch.device, shared: bool = False, parts: int = 1
    ) -> None:
        """shared: whether other processes may map the blocks. They are then in an in-memory file, `handle`, if the
        system supports such files and blocks are not divided. parts: of a block; 1 for undivided blocks."""
        self.handle: int | None = None
        # Zeros, since some entries are read although they were never stored, and 0 * NaN is NaN. These are entries of
        # the null block, which have weight 0 for tokens outside a window, and entries of tokens that a drafter has
        # missed.
        if shared and parts == 1 and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):
                self.handle = os.memfd_create("quire-kv")
        if parts > 1:
            by_part = zeros(parts, num_blocks, block_bytes // parts, dtype=torch.uint8, device=device)
            self.blocks = by_part.transpose(0, 1)
        elif self.handle is None:
            self.blocks = zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
        else:
            self.blocks = self._mapped(self.handle, num_blocks * block_bytes).view(num_blocks, block_bytes)
        self._words = self.blocks.view(torch.int64)  # torch moves words faster than bytes

    def _mapped(self, handle: int, size: int) -> Tensor:
        """Return zeros in a file that is deleted with this object, and uses no memory until it is touched."""
        weakref.finalize(self, os.close, handle)
        os.ftruncate(handle, size)
        self._region = mmap.mmap(handle, size)
        with contextlib.suppress(OSError):
            self._region.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(self._region, dtype=torch.uint8)

    def give_back(self) -> None:
        """Return the pages of a shared file to the system. When they are touched again, they are zeros."""
        if self.handle is not None:
            self._region.madvise(mmap.MADV_REMOVE)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block sources[i] to block targets[i]. All sources are read before any target is written."""
        copied = self._words.index_select(0, self._index(sources))
        self._words.index_copy_(0, self._index(targets), copied)

    def read(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of these blocks, [len(block_ids), block_bytes]. Waits for the device."""
        words = self._words.index_select(0, self._index(block_ids)).flatten(1)
        return words.cpu().view(torch.uint8).numpy()

    def write(self, block_ids: Sequence[int], data: bytes | memoryview | npt.NDArray[np.uint8]) -> None:
        """Fill these blocks with bytes that `read` returned, on this rank or on one with the same cache layout. Raises
        ValueError if the number of bytes does not match the blocks."""
        index = self._index(block_ids)
        size = self.blocks[0].numel()
        received = np.frombuffer(data, np.uint8)
        if len(received) != len(index) * size:
            raise ValueError(f"{len(index)} blocks of {size} bytes cannot be filled with {len(received)} bytes")
        # Copied because the caller may change `data` before the device has read it, and torch needs writable memory.
        words = received.copy().view(np.int64).reshape(len(index), *self._words.shape[1:])
        self._words.index_copy_(0, index, upload(words, self.blocks.device))

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        """Return the block ids on the device. Raises ValueError for an id that no request can hold."""
        index = np.array(block_ids, np.int64)
        outside = index[(index <= 0) | (index >= len(self.blocks))]
        if len(outside):
            raise ValueError(f"block {outside[0]} is not one of the blocks 1 to {len(self.blocks) - 1}")
        return upload(index, self.blocks.device)
