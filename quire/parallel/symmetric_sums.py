"""Sums over the GPUs of one machine in one kernel, through memory that all of them can read (torch's symmetric memory).

Each rank copies its summand into its buffer, and adds up the buffers of all ranks in rank order. This needs one
exchange of signals, whereas a ring needs twice as many as there are ranks, so it is faster for small tensors.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.parallel.mesh import Communicator, Shortcut

_MOST_BYTES = 256 << 10  # larger tensors are faster in NCCL's rings
_ALIGNMENT = 16  # bytes


class SymmetricSums(Shortcut):
    """Supports contiguous tensors of the buffer's type and device, up to its size."""

    def __init__(self, buffer: Tensor, name: str) -> None:
        """name: of the process group whose ranks have exchanged the addresses of their buffers."""
        self.buffer = buffer
        self.name = name

    def all_reduce(self, x: Tensor) -> bool:
        if x.device != self.buffer.device or x.dtype is not self.buffer.dtype or not x.is_contiguous():
            return False
        if x.nbytes > self.buffer.nbytes or x.nbytes % _ALIGNMENT:
            return False
        shown = self.buffer[: x.numel()].view(x.shape).copy_(x)
        torch.ops.symm_mem.one_shot_all_reduce_out(shown, "sum", self.name, x)
        return True


def with_symmetric_sums(group: Communicator, device: torch.device, dtype: torch.dtype) -> Communicator:
    """Return the group with small sums through symmetric memory. Each rank must have its own GPU on this machine.

    The group is returned unchanged, with NCCL for all sums, if the GPUs cannot read each other's memory, if torch does
    not support the type, or if anything fails.
    """
    if group.size == 1 or not group.capturable:  # only NCCL's sums are capturable
        return group
    buffer = None
    problem = "the GPUs cannot read each other's memory, or the type has no such sums"
    try:
        if dtype in (torch.float32, torch.bfloat16) and _all_can_read(device):
            import torch.distributed._symmetric_memory as memory

            buffer = memory.empty(_MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
    except Exception as error:  # it depends on drivers, cards and torch
        problem = error_text(error)
    if group.minimum(int(buffer is not None)):
        assert buffer is not None
        assert group.group is not None
        sums = SymmetricSums(buffer, group.group.group_name)
        works = False
        try:
            with torch.cuda.device(device):  # kernels are launched on the current device
                memory.rendezvous(buffer, group.group)
                ones = torch.ones(_ALIGNMENT, dtype=dtype, device=device)
                works = sums.all_reduce(ones) and bool((ones == group.size).all())
        except Exception as error:
            problem = error_text(error)
        if group.minimum(int(works)):
            return replace(group, shortcut=sums)
    logger.info("The ranks add up with NCCL alone: %s", problem.partition("\n")[0])
    return group


def _all_can_read(device: torch.device) -> bool:
    others = (index for index in range(torch.cuda.device_count()) if index != device.index)
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)
