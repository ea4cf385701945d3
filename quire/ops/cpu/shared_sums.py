"""Sums over the ranks of a machine, through memory that they share (shared_sums.cpp)."""

import ctypes
import mmap
import os
from dataclasses import replace

import torch
from torch import Tensor

from quire.metrics.logging import logger
from quire.ops.cpu.build import kernel, library
from quire.parallel.mesh import Communicator

_ARRIVAL_BYTES = 64  # of a rank, see shared_sums.cpp
_SLOT_BYTES = 1 << 19  # of a rank in a round; what is larger takes several rounds


def with_shared_sums(group: Communicator) -> Communicator:
    """The group, with sums of float32 and bfloat16 on CPUs through shared memory. All ranks must be on this machine.

    The group stays as it was if the kernels are missing somewhere, or the system gives no such memory.
    """
    if group.size == 1:
        return group
    memory = None if library() is None else _share(group)
    if not group.minimum(int(memory is not None)):
        logger.warning("The ranks cannot share memory, so steps take longer")
        return group
    assert memory is not None
    first = ctypes.c_char.from_buffer(memory)  # keeps the memory mapped as long as `add_up` exists

    def add_up(x: Tensor) -> bool:
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16) or not x.is_contiguous():
            return False
        kernel("quire_all_reduce", "iplpiil")(
            x.dtype is torch.bfloat16, x.data_ptr(), x.numel(), ctypes.addressof(first), group.rank, group.size,
            _SLOT_BYTES,
        )  # fmt: skip
        return True

    return replace(group, add_up=add_up, capturable=True)


def _share(group: Communicator) -> mmap.mmap | None:
    """The memory of the ranks. It has no name, so it is gone with the last of them. Only rank 0 reserves it; the others
    find it among the open files of that process. None if this rank cannot have it."""
    size = group.size * (_ARRIVAL_BYTES + 2 * _SLOT_BYTES)
    place = torch.full((2,), -1)
    if group.rank == 0:
        try:
            file = os.memfd_create("quire-sums")
            os.posix_fallocate(file, 0, size)
            place = torch.tensor([os.getpid(), file])
        except OSError:
            pass
    process, number = group.broadcast(place).tolist()
    try:
        file = number if group.rank == 0 else os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        memory = mmap.mmap(file, size)
    except (OSError, ValueError):
        memory = None
    group.minimum(0)  # all have opened it
    if number >= 0 and (group.rank == 0 or memory is not None):
        os.close(file)
    return memory
