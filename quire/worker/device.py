"""What a worker asks of its device: one copy there a step, one back, and no waiting for either."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.config import ConfigError
from quire.layers.step_inputs import Array
from quire.parallel.mesh import Mesh

_ALIGNMENT = 16


def on_gpu(option: str) -> bool:
    """Whether the option `device` means a GPU. Raises ConfigError if it asks for one and there is none."""
    if option == "cpu" or torch.cuda.is_available():
        return option != "cpu"
    if option == "cuda":
        raise ConfigError("device='cuda' was asked for, but torch finds no GPU; install its CUDA build, or take 'cpu'")
    return False


class Device:
    """The CPU: everything is over when a call returns, and arrays are used where they are."""

    is_async = False  # whether the host runs ahead, so that it does not know yet what was sampled last

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """The arrays on the device, for the step that is about to be launched; they must not be changed any more."""
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def download(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to fetch tensors as they are now. The function waits, and gives them in the host's memory."""
        return lambda: list(tensors)

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Note what `run` launches: where its result will be, and the function that launches all of it again."""
        raise NotImplementedError


class CudaDevice(Device):
    """A GPU. Everything goes through one stream; pinned memory lets copies run beside the host."""

    is_async = True

    def __init__(self, device: torch.device, steps_in_flight: int = 2) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)
        self._pool: Any = None  # memory of captured graphs, of which one runs at a time
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._turn = 0
        self._buffers = [_Pinned() for _ in range(steps_in_flight + 1)]

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        ends = layout(arrays)
        size = max(ends.values())
        self._turn = (self._turn + 1) % len(self._buffers)
        here = self._buffers[self._turn]
        if not here.read.query():  # type: ignore[no-untyped-call]  # the copy of some steps ago has long been made
            here.read.synchronize()
        if len(here.bytes) < size:
            here.bytes = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        pack(arrays, ends, here.bytes.numpy())
        there = torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        there.copy_(here.bytes[:size], non_blocking=True)
        here.read.record()
        return unpack(arrays, ends, there)

    def download(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        here = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for target, source in zip(here, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def read() -> list[Tensor]:
            arrived.synchronize()
            return here

        return read

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            run()  # compiles what it needs
            graph.capture_begin(pool=self._pool)  # torch.cuda.graph would collect garbage each time
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # which would say no more than that something failed
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(self._side)
        return result, graph.replay


class _Pinned:
    """Host memory, and the event after which it may be written again."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]


def layout(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Where each array ends in a buffer that holds them one after the other."""
    ends, end = {}, 0
    for name, array in arrays.items():
        end = ends[name] = end + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return ends


def pack(arrays: Mapping[str, Array], ends: Mapping[str, int], memory: Array) -> None:
    """Lay arrays into bytes, one after the other."""
    start = 0
    for name, array in arrays.items():
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = ends[name]


def unpack(arrays: Mapping[str, Array], ends: Mapping[str, int], buffer: Tensor) -> dict[str, Tensor]:
    """Views of a buffer that was packed."""
    tensors, start = {}, 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors[name] = buffer[start : start + array.nbytes].view(dtype).view(array.shape)
        start = ends[name]
    return tensors


def choose_device(option: str, mesh: Mesh) -> Device:
    """What the option `device` means on one of the mesh's ranks. Raises ConfigError as `on_gpu` does."""
    if not on_gpu(option):
        return Device(mesh.device("cpu"))
    return CudaDevice(mesh.device("cuda"))
