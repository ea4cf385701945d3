"""A worker's access to its device: each step takes one copy to the device and one back, and neither blocks the host."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import ConfigError
from quire.layers.step_inputs import Array
from quire.parallel.mesh import Mesh

_ALIGNMENT = 16


def on_gpu(option: str) -> bool:
    """Whether the option `device` means a GPU. Raises ConfigError if it asks for a GPU and torch finds none."""
    if option == "cpu" or torch.cuda.is_available():
        return option != "cpu"
    if option == "cuda":
        raise ConfigError("device='cuda' was asked for, but torch finds no GPU; install its CUDA build, or use 'cpu'")
    return False


class Device:
    """The CPU. Work is done when a call returns, and arrays are used in place."""

    is_async = False  # whether the host runs ahead, before it knows the last sampled tokens

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Copy the arrays to the device for the next step. The caller must not change them afterwards."""
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def download(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Start to copy the tensors, as they are now, to the host. The returned function waits for the copies and
        returns them."""
        return lambda: list(tensors)

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Capture the kernels that `run` launches. Returns the tensor of its result, and a function that launches the
        kernels again."""
        raise NotImplementedError

    def forget_graphs(self) -> None:
        """Free the memory that graphs share. Called when none of them exists any more."""


class CudaDevice(Device):
    """A GPU. All work goes through one stream. With pinned memory, the host continues during copies."""

    is_async = True

    def __init__(self, device: torch.device, steps_in_flight: int = 2) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)
        self._pool: Any = None  # memory that all captured graphs share, since only one runs at a time
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._turn = 0
        # A step uploads its inputs, and then the data for masks and drafts. An unused buffer has no memory.
        self._buffers = [_Pinned() for _ in range(4 * steps_in_flight)]

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        ends = layout(arrays)
        size = max(ends.values())
        self._turn = (self._turn + 1) % len(self._buffers)
        pinned = self._buffers[self._turn]
        if not pinned.read.query():  # type: ignore[no-untyped-call]  # rare: that copy was launched some steps ago
            pinned.read.synchronize()
        if len(pinned.bytes) < size:
            pinned.bytes = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        pack(arrays, ends, pinned.bytes.numpy())
        on_device = torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        on_device.copy_(pinned.bytes[:size], non_blocking=True)
        pinned.read.record()
        return unpack(arrays, ends, on_device)

    def download(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for target, source in zip(pinned, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def read() -> list[Tensor]:
            arrived.synchronize()
            return pinned

        return read

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        main_stream = torch.cuda.current_stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._side.wait_stream(main_stream)
        with torch.cuda.stream(self._side):
            run()  # compiles its kernels
            graph.capture_begin(pool=self._pool)  # torch.cuda.graph would collect garbage at each capture
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it reports only that the capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
        main_stream.wait_stream(self._side)
        return result, graph.replay

    def forget_graphs(self) -> None:
        self._pool = None
        torch.cuda.empty_cache()


class _Pinned:
    """Pinned host memory, and the event after which it may be overwritten."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]


def layout(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Return the end of each array, in bytes, in a buffer that holds the arrays one after the other."""
    ends = {}
    end = 0
    for name, array in arrays.items():
        end = ends[name] = end + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return ends


def pack(arrays: Mapping[str, Array], ends: Mapping[str, int], memory: Array) -> None:
    """Copy the arrays into `memory`, one after the other."""
    start = 0
    for name, array in arrays.items():
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = ends[name]


def unpack(arrays: Mapping[str, Array], ends: Mapping[str, int], buffer: Tensor) -> dict[str, Tensor]:
    """Return views of the arrays in a buffer that `pack` filled."""
    tensors = {}
    start = 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors[name] = buffer[start : start + array.nbytes].view(dtype).view(array.shape)
        start = ends[name]
    return tensors


def choose_device(option: str, mesh: Mesh) -> Device:
    """Return the device of a rank for the option `device`. Raises ConfigError as `on_gpu` does."""
    if not on_gpu(option):
        return Device(mesh.device("cpu"))
    return CudaDevice(mesh.device("cuda"))
