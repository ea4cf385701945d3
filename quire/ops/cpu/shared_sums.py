"""Sums over the ranks of a machine, and rows of all of them, through memory that they share (shared_sums.cpp)."""

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

_ARRIVAL_BYTES = 64  # of a rank, see shared_sums.cpp
_SLOT_BYTES = 1 << 19  # of a rank in a round; what is larger takes several rounds


class SharedSums(Shortcut):
    """Takes contiguous tensors on CPUs: sums of floating-point numbers, and rows of any type."""

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
    """The group, with exchanges on CPUs through shared memory. All ranks must be on this machine.

    The group stays as it was if the kernels are missing somewhere, or the system gives no such memory.
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
    """The memory of the ranks. It has no name, so it is gone with the last of them. Rank 0 reserves it, and the others
    find it among the open files of that process. None if this rank cannot have it."""
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
    """A file in memory, of so many bytes; None if the system gives none."""
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
