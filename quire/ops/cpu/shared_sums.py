"""Sums and gathered rows over the ranks of one machine, through shared memory (shared_sums.cpp)."""

import contextlib
import ctypes
import mmap
import os
from dataclasses import replace

import torch
from torch import Tensor

from quire.observability.logging import logger
from quire.ops.cpu.build import CODES, kernel, library
from quire.parallel.mesh import Communicator, Shortcut

_ARRIVAL_BYTES = 64  # per rank, see shared_sums.cpp
_SLOT_BYTES = 1 << 19  # per rank and round; larger tensors take several rounds


class SharedSums(Shortcut):
    """Handles contiguous tensors on CPUs: sums of floating-point numbers, and rows of any type."""

    def __init__(self, group: Communicator, memory: mmap.mmap) -> None:
        self.group = group
        self.first = ctypes.c_char.from_buffer(memory)  # keeps the memory mapped as long as this object exists
        self.place = ctypes.addressof(self.first), group.rank, group.size, _SLOT_BYTES

    def all_reduce(self, x: Tensor) -> bool:
        return self._reduce(x, x, 0, x.numel())

    def reduce_scatter(self, x: Tensor, out: Tensor) -> bool:
        start, stop = self.group.share(len(x))
        return self._reduce(x, out, start * x.shape[1], stop * x.shape[1])

    def _reduce(self, x: Tensor, out: Tensor, start: int, stop: int) -> bool:
        if x.device.type != "cpu" or x.dtype not in CODES or not x.is_contiguous():
            return False
        kernel("quire_reduce", "iplpllpiil")(
            CODES[x.dtype], x.data_ptr(), x.numel(), out.data_ptr(), start, stop, *self.place
        )
        return True

    def all_gather(self, x: Tensor, out: Tensor) -> bool:
        if x.device.type != "cpu":
            return False
        x = x.contiguous()
        part = -(-len(out) // self.group.size) * out.stride(0) * out.itemsize
        kernel("quire_gather", "ppllpiil")(x.data_ptr(), out.data_ptr(), part, out.nbytes, *self.place)
        return True


def with_shared_sums(group: Communicator) -> Communicator:
    """Return the group, with exchanges on CPUs through shared memory. All ranks must be on this machine.

    The group is unchanged if a rank lacks the kernels, or the system does not provide shared memory.
    """
    if group.size == 1 or not group.minimum(int(library() is not None)):
        return group
    memory = _share(group)
    if not group.minimum(int(memory is not None)):
        logger.warning("The ranks cannot share memory, so steps take longer")
        return group
    assert memory is not None
    return replace(group, shortcut=SharedSums(group, memory), capturable=True)


def _share(group: Communicator) -> mmap.mmap | None:
    """Return the ranks' shared memory. It has no name, so it is freed when the last rank exits. Rank 0 reserves it, and
    the others find it among the open files of that process. None if this rank cannot open it."""
    size = group.size * (_ARRIVAL_BYTES + 2 * _SLOT_BYTES)
    memory = None
    file = _reserve(size) if group.rank == 0 else None
    process, number = group.broadcast(torch.tensor([os.getpid(), -1 if file is None else file])).tolist()
    with contextlib.suppress(OSError):
        if group.rank > 0 and number >= 0:
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        if file is not None:
            memory = mmap.mmap(file, size)
    group.minimum(0)  # all have opened it
    if file is not None:
        os.close(file)
    return memory


def _reserve(size: int) -> int | None:
    """Return a file in memory of `size` bytes, or None if the system does not provide one."""
    try:
        file = os.memfd_create("quire-sums")
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        return None
    return file
