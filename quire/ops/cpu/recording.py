"""Records the kernel calls of a function and replays them without Python, like a CUDA graph on a GPU.

A recorded function must consist of kernels, views and new tensors. Anything that torch itself computes would be missing
from the replay. The tensors of a recorded function are in an arena, so their addresses stay valid.
"""

import ctypes
import math
import struct
import weakref
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops.cpu import build

_NEW = {"aten::empty", "aten::new_empty", "aten::empty_like"}
_READS = {"aten::resolve_conj"}  # the trace that tolist() leaves: it reads the data
_SMALLEST = 4096  # size of the smallest buffer in bytes


class Arena:
    """Memory for the tensors of recorded functions. All functions share it, since only one runs at a time.

    Sizes of buffers are powers of two, so that steps of many sizes can share them. A buffer becomes free again when the
    last tensor in it is deleted.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        room = max(_SMALLEST, 1 << (size - 1).bit_length())
        free = self._free.setdefault(room, [])
        buffer = free.pop() if free else torch.empty(room, dtype=torch.uint8).numpy()
        lent = buffer[:size]  # a separate object, alive as long as any tensor uses its memory
        weakref.finalize(lent, free.append, buffer).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records kernels. obstacle: the first operation that cannot be replayed, if any."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena = arena
        self.obstacle: str | None = None
        self._calls: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import its compiler, which takes a second and 130 MB

    def __enter__(self) -> Self:
        build.recorder.record = self._record
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        build.recorder.record = None
        if self.obstacle is None:  # with an obstacle, there may be no compiled library
            self._words = (ctypes.c_int64 * len(self._calls))(*self._calls)
            self._replay = build.kernel("quire_replay", "pl")

    def replay(self) -> None:
        """Repeat the recorded calls, with the same addresses. There must be no obstacle."""
        self._replay(self._words, len(self._words))

    def _record(self, name: str, arguments: str, function: Callable[..., None]) -> Callable[..., None]:
        address = build.recordable(name)
        if address is None:
            self.obstacle = self.obstacle or name

        def call(*values: Any) -> None:
            function(*values)
            self._calls += [address or 0, len(values), *map(_word, arguments, values)]

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        kwargs = kwargs or {}
        if name in _NEW:
            like = args[0] if isinstance(args[0], Tensor) else None
            shape = args[0 if like is None else 1] if name != "aten::empty_like" else args[0].shape
            dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
            return self.arena.empty(tuple(shape), dtype)
        result = func(*args, **kwargs)
        if not func.is_view or name in _READS or not _same_memory(result, args[0]):
            self.obstacle = self.obstacle or name
        return result


def _word(letter: str, value: Any) -> int:
    """Return an argument of a kernel, encoded in 64 bits."""
    if letter == "f":
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value or 0)


def _same_memory(views: Tensor | list[Tensor], source: Tensor) -> bool:
    address = source.untyped_storage().data_ptr()
    return all(t.untyped_storage().data_ptr() == address for t in ([views] if isinstance(views, Tensor) else views))
