"""Memory for weights: on huge pages, where they are read 7-12 % faster. And the way to a device."""

import ctypes
import math
import sys
import threading
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from quire.ops.cpu.build import kernel, library

_WORTHWHILE = 1 << 22  # bytes that get huge pages of their own: two of them
_SHARED = 1 << 16  # bytes from which on smaller tensors share some
_SLAB = 1 << 25
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.empty; on a CPU on huge pages, if it is large."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= _WORTHWHILE and library() is not None:
        kernel("quire_advise_huge_pages", "pl")(tensor.data_ptr(), tensor.nbytes)
    return tensor


def keep_what_is_freed() -> None:
    """From now on, this process keeps the memory that it frees, for what it allocates next.

    A step's large tensors would else be new memory in each layer, whose pages come one by one (docs/performance.md).
    By mallopt of glibc; other C libraries are left as they are.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, without waiting for what the device does meanwhile."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # from other memory, copies wait for the stream


class Slabs(threading.local):
    """Tensors that are to stay, side by side on huge pages. A slab is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Like `empty`, for what lives as long as the model."""
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or not _SHARED <= size < _WORTHWHILE:
            return empty(*shape, dtype=dtype, device=device)
        if self._used + size > len(self._slab):
            self._slab, self._used = empty(_SLAB, dtype=torch.uint8, device=device), 0
        part = self._slab[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        return part.view(dtype).view(shape)


lasting = Slabs()
