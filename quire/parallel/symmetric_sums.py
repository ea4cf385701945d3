"""Sums over the GPUs of one machine in one kernel, through memory that all of them can read (torch's symmetric memory).

Each rank copies its summand into its buffer. Small tensors are added up in one shot: each rank adds up the buffers of
all ranks in rank order. This needs one exchange of signals, whereas a ring needs twice as many as there are ranks.
Larger tensors take two shots, so that each element crosses the links fewer times: each rank adds up its share of the
elements, and the others read the result. With NVLink SHARP (multicast memory), the switch adds up and distributes.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.parallel.mesh import Communicator, Shortcut

_ONE_SHOT_BYTES = 256 << 10
_MOST_BYTES = 32 << 20  # larger tensors are as fast in NCCL, and would need a larger buffer
_ALIGNMENT = 16  # bytes
_TWO_SHOT_RANKS = (2, 4, 8)  # for which torch has a kernel
_FEWEST_MULTICAST_RANKS = 4  # two ranks exchange the same bytes either way, and multicast needs another copy


class SymmetricSums(Shortcut):
    """Supports contiguous tensors of the buffer's type and device, up to `most_bytes`."""

    def __init__(self, buffer: Tensor, name: str, has_multicast: bool) -> None:
        """name: of the process group whose ranks have exchanged the addresses of their buffers. has_multicast: whether
        the buffers are also mapped as multicast memory, and used so for tensors that are not small."""
        self.buffer = buffer
        self.name = name
        self.has_multicast = has_multicast
        self.most_bytes = buffer.nbytes

    def all_reduce(self, x: Tensor) -> bool:
        if x.device != self.buffer.device or x.dtype is not self.buffer.dtype or not x.is_contiguous():
            return False
        if x.nbytes > self.most_bytes or x.nbytes % _ALIGNMENT or x.storage_offset() * x.itemsize % _ALIGNMENT:
            return False
        shown = self.buffer[: x.numel()].view(x.shape).copy_(x)
        if x.nbytes <= _ONE_SHOT_BYTES:
            torch.ops.symm_mem.one_shot_all_reduce_out(shown, "sum", self.name, x)
        elif self.has_multicast:
            torch.ops.symm_mem.multimem_all_reduce_(shown, "sum", self.name)
            x.copy_(shown)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_out(shown, "sum", self.name, x)
        return True


def with_symmetric_sums(group: Communicator, device: torch.device, dtype: torch.dtype) -> Communicator:
    """Return the group with sums through symmetric memory. Each rank must have its own GPU on this machine.

    The group is returned unchanged, with NCCL for all sums, if the GPUs cannot read each other's memory, if torch does
    not support the type, or if anything fails. If only the larger sums fail, NCCL computes those.
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
        sums = None
        try:
            handle = memory.rendezvous(buffer, group.group)
            has_multicast = bool(handle.multicast_ptr) and group.size >= _FEWEST_MULTICAST_RANKS
            sums = SymmetricSums(buffer, group.group.group_name, has_multicast)
        except Exception as error:
            problem = error_text(error)
        if group.minimum(int(sums is not None)):
            assert sums is not None
            small = _problem(sums, group.size, _ONE_SHOT_BYTES)
            if group.minimum(int(small is None)):
                return replace(group, shortcut=_with_larger_sums(group, sums))
            problem = small or "a sum of another rank is wrong"
    logger.info("The ranks add up with NCCL alone: %s", problem.partition("\n")[0])
    return group


def _with_larger_sums(group: Communicator, sums: SymmetricSums) -> SymmetricSums:
    """Limit the sums to small tensors if larger ones fail on any rank."""
    problem: str | None = f"torch has no such sums for {group.size} ranks"
    if sums.has_multicast or group.size in _TWO_SHOT_RANKS:
        problem = _problem(sums, group.size, _ONE_SHOT_BYTES + _ALIGNMENT * group.size)
    if not group.minimum(int(problem is None)):
        sums.most_bytes = _ONE_SHOT_BYTES
        reason = problem or "a sum of another rank is wrong"
        logger.info("The ranks add up tensors above 256 KiB with NCCL: %s", reason.partition("\n")[0])
    return sums


def _problem(sums: SymmetricSums, ranks: int, size: int) -> str | None:
    """Return why a sum of `size` bytes fails, or None if it is right."""
    device = sums.buffer.device
    try:
        with torch.cuda.device(device):  # kernels are launched on the current device
            ones = torch.ones(size // sums.buffer.itemsize, dtype=sums.buffer.dtype, device=device)
            is_right = sums.all_reduce(ones) and bool((ones == ranks).all())
    except Exception as error:
        return error_text(error)
    return None if is_right else "a sum is wrong"


def _all_can_read(device: torch.device) -> bool:
    others = (index for index in range(torch.cuda.device_count()) if index != device.index)
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)
