"""Simulates a GPU that is not present. The engine's own code runs on it unchanged; only the GPU's computations are
omitted.

Tensors on the simulated GPU have shapes, types and strides, but no memory, so models of any size fit. An operation on
such tensors returns a tensor with the right shape. A launch of a Triton kernel compiles the kernel for the card, down
to machine code, but does not run it. Copies to the host arrive as zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from quire.cli.simulated_memory import SimulatedMemory
from quire.cli.simulated_streams import Streams
from quire.platform.gpu.cards import Card

_CUDA, _META = 1, 14  # torch's numbers of these types of devices
_BASE = 2**40  # the address at which every allocation of the stand-in begins, as far as kernels can tell


class PinnedMemory:
    """The host tensors in pinned memory."""

    def __init__(self) -> None:
        self._tensors = WeakTensorKeyDictionary()

    def add(self, tensor: Tensor) -> Tensor:
        self._tensors[tensor] = tensor.untyped_storage().data_ptr()
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._tensors.values()  # type: ignore[no-untyped-call]


@dataclass
class SimulatedGpu:
    """The activity of the device so far.

    num_loaded: kernels that Triton compiled or read from its cache. cache_misses: the names of those that it had to
    compile. kernels: the launched ones, by hash. waits: how often the host waited for a value. streams: raise an error
    for what cannot be captured in a graph. memory: None for a device on which everything fits.
    """

    card: Card
    num_loaded: int = 0
    cache_misses: list[str] = field(default_factory=list)
    kernels: dict[str, Any] = field(default_factory=dict)
    waits: int = 0
    streams: Streams = field(default_factory=Streams)
    pinned: PinnedMemory = field(default_factory=PinnedMemory)
    memory: SimulatedMemory | None = None

    @property
    def graph(self) -> type:
        """The class of the device's graphs."""
        return type("CUDAGraph", (Graph,), {"_device": self})

    @property
    def free_memory(self) -> tuple[int, int]:
        """Return the free and the total bytes."""
        return (self.card.memory, self.card.memory) if self.memory is None else (self.memory.free, self.memory.total)

    def wait(self, reason: str) -> None:
        """Called when the host waits for a value."""
        self.waits += 1
        self.streams.forbid(reason)

    def launched(
        self, name: str, arguments: dict[str, Any], grid: tuple[int, ...] = (), kernel: Any = None, result: Any = None
    ) -> None:
        """Called for work that the engine submits to the device.

        arguments: the tensors and numbers; the tensors are simulated. kernel: Triton's compiled kernel with its
        machine code, or None if `name` is an operation of torch.
        """


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations on the simulated device's tensors only compute shapes. Operations on host tensors run as usual."""

    def __init__(self, device: SimulatedGpu, shapes: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.shapes = shapes or FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned = device.pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if target is not None and target.type == "cuda":
            kwargs["device"] = target = torch.device("cuda", target.index or 0)
        is_ours = any(isinstance(x, FakeTensor) for x in tree_flatten((args, kwargs))[0])
        if not is_ours and (target is None or target.type != "cuda"):
            return self._on_host(func, args, kwargs, is_pinned)
        if func.name() in ("aten::to.device", "aten::to.dtype", "aten::to.dtype_layout", "aten::to.other"):
            with self:  # in inference mode, torch does not take these apart by itself
                return func.decompose(*args, **kwargs)
        if self.device.streams.checks_work:
            self._check_work(func, args, kwargs)
        on_host = self._copy_to_host(func, args, kwargs, target)
        return self._on_device(func, args, kwargs, target) if on_host is None else on_host

    def _on_host(self, func: Any, args: Any, kwargs: Any, is_pinned: bool) -> Any:
        aten = torch.ops.aten
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            return self._pinned.add(args[0].clone())
        if func is aten.is_pinned.default:
            return args[0] in self._pinned
        if func is aten._to_copy.default and kwargs.get("device") == torch.device("meta"):  # so torch.tensor begins
            self.device.streams.forbid("a new tensor copies pageable memory")
        result = func(*args, **kwargs)
        return self._pinned.add(result) if is_pinned else result

    def _on_device(self, func: Any, args: Any, kwargs: Any, target: torch.device | None) -> Any:
        aten = torch.ops.aten
        if func is aten.nonzero.default:  # the host finds no element, since values arrive as zeros
            self.device.wait("the host waits for the number of nonzero elements")
            func = aten.new_empty.default
            args = (args[0], (0, args[0].dim()))
            kwargs = {"dtype": torch.int64}
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            func = aten.empty_like.default
            kwargs = {"dtype": kwargs.get("dtype"), "device": target}
        with self.shapes:
            result = func(*args, **kwargs)
        if self.device.memory is not None:
            for tensor in tree_flatten(result)[0]:
                if isinstance(tensor, FakeTensor):
                    self.device.memory.hold(tensor)
        if func.namespace == "aten":
            self.device.launched(str(func), {"args": args, **kwargs}, result=result)
        return result

    def _copy_to_host(self, func: Any, args: Any, kwargs: Any, target: torch.device | None) -> Any:
        """Return the result of an operation that copies values to the host: zeros. None for any other operation."""
        aten = torch.ops.aten
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            if not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
                self.device.wait("the host waits for a copy")
            return args[0].zero_()
        if func is aten._to_copy.default and target is not None and target.type == "cpu":
            if not kwargs.get("non_blocking"):
                self.device.wait("the host waits for a copy")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.equal.default:  # such as of a checkpoint's order of inputs with the usual order
            self.device.wait("the host waits for a comparison")
            return True
        if func is aten._local_scalar_dense.default:
            self.device.wait("the host waits for a value")
            return args[0].dtype.is_floating_point and 0.0
        return None

    def _check_work(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raises RuntimeError if the operation cannot be captured, or if it reports an earlier error."""
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view:
            return
        host = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and not isinstance(x, FakeTensor)]
        copies = func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        for tensor in host if self.device.streams.is_capturing else ():
            if (copies or tensor.dim()) and tensor not in self._pinned:
                self.device.streams.forbid(f"{func} copies pageable memory")
        self.device.streams.submit(str(func))


class _Pointer:
    """The parts of a tensor that Triton's launcher needs: its type and its address."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._offset = tensor.dtype, int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return _BASE + self._offset


class _Driver:
    """Triton's driver for a card, which names the target but launches nothing."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self._card.backend, self._card.capability, self._card.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A replacement for effects that only a GPU has."""


class Graph:
    """A CUDA graph without contents."""

    _device: SimulatedGpu  # of a subclass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_captured = False

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self._device.streams.begin()
        if self._device.memory is not None:
            self._device.memory.is_capturing = True

    def capture_end(self) -> None:
        memory = self._device.memory
        if memory is not None:
            memory.is_capturing = False
        self._device.streams.end()
        if memory is not None:
            memory.add_graph(self)
        self._is_captured = True

    def replay(self) -> None:
        if not self._is_captured:
            raise RuntimeError("a graph is replayed without a successful capture")


class _Generator(torch.Generator):
    """Random numbers for the simulated GPU: torch's CPU build has no generator for a GPU."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


def _torch_cuda(device: SimulatedGpu, count: int) -> dict[str, Any]:
    """Replacements for functions of torch.cuda."""
    card = device.card
    major, minor = divmod(card.capability, 10) if isinstance(card.capability, int) else (9, 4)
    properties = SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.memory,
        multi_processor_count=card.processors,
        shared_memory_per_block_optin=card.shared_memory,
        shared_memory_per_multiprocessor=card.processor_memory,
        regs_per_multiprocessor=card.registers,
        warp_size=card.warp_size,
        gcnArchName=card.capability if card.backend == "hip" else "",
    )

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    def allocated(*args: Any, **kwargs: Any) -> int:
        return 0 if device.memory is None else device.memory.allocated

    def peak(*args: Any, **kwargs: Any) -> int:
        return 0 if device.memory is None else device.memory.peak

    def reset_peak(*args: Any, **kwargs: Any) -> None:
        if device.memory is not None:
            device.memory.reset_peak()

    return {
        "_lazy_init": _nothing,
        "init": _nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: count,
        "current_device": zero,
        "set_device": _nothing,
        "ipc_collect": _nothing,
        "set_sync_debug_mode": _nothing,
        "get_device_name": lambda *_: card.name,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (major, minor),
        "is_bf16_supported": lambda *_: True,
        "mem_get_info": lambda *_: device.free_memory,
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": reset_peak,
        "graph_pool_handle": lambda: (0, 0),
        "CUDAGraph": device.graph,
        **device.streams.replacements(),
    }


def _collectives(device: SimulatedGpu) -> dict[str, Any]:
    """Replacements for functions of torch.distributed. Collectives exchange nothing if their tensors are on the
    simulated GPU. The same applies to a process that has not joined others, as one rank of a Communicator(rank, size,
    group=None)."""

    def replaced(name: str) -> Any:
        collective = getattr(torch.distributed, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            is_ours = any(isinstance(x, FakeTensor) for x in tree_flatten(args)[0])
            if torch.distributed.is_initialized() and not is_ours:
                return collective(*args, **kwargs)
            device.launched(name, {"args": args, **kwargs})
            return None

        return run

    join = torch.distributed.init_process_group

    def join_on_host(backend: str, **options: Any) -> None:
        join("gloo", **options)

    def exchange(operations: list[Any]) -> list[Any]:
        device.launched("batch_isend_irecv", {"args": operations})
        return []

    names = (
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "all_to_all_single",
        "broadcast",
        "barrier",
    )
    functions: dict[str, Any] = {name: replaced(name) for name in names if hasattr(torch.distributed, name)}
    functions.update(P2POp=lambda *args, **_: args, batch_isend_irecv=exchange)
    return functions | {"is_nccl_available": lambda: True, "init_process_group": join_on_host}


def _allow_device_type() -> None:
    """Let torch's CPU build handle tensors that claim to be on a GPU: views of them need a guard of the device type.
    A guard that does nothing is borrowed from the type `meta`. (torch does the same itself in its CUDA builds.)"""
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        torch._C._ensureCUDADeviceGuardSet()
        return
    library = ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so")
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_CUDA] or guards[_META]


@contextlib.contextmanager
def stand_in(card: Card, count: int = 1, device: SimulatedGpu | None = None) -> Iterator[SimulatedGpu]:
    """Within this block, torch finds `count` GPUs of the kind `card`, as devices cuda:0 and so on. This applies to this
    thread and to threads started within the block. device: records the activity; a new one if None.
    """
    import triton
    from triton.runtime.jit import JITFunction

    device = device or SimulatedGpu(card)
    run = JITFunction.run
    operations = _Operations(device)  # created first: this imports parts of torch that check torch.cuda

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        pointers = [_Pointer(x) if isinstance(x, Tensor) else x for x in args]
        compiled = run(kernel, *pointers, grid=grid, warmup=True, **options)
        device.streams.load(compiled.hash, kernel.__name__)
        device.streams.submit(kernel.__name__)
        device.kernels[compiled.hash] = compiled
        names = dict(zip(kernel.arg_names, args, strict=False)) | options
        device.launched(kernel.__name__, names, tuple(grid), compiled)
        return compiled

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        device.num_loaded += 1
        if not cache_hit:
            device.cache_misses.append(src.name)

    run_thread = threading.Thread.run

    def thread(self: threading.Thread) -> None:
        torch._C._set_only_lift_cpu_tensors(True)
        with _Operations(device, operations.shapes):
            run_thread(self)

    _allow_device_type()
    lift = torch._C._only_lift_cpu_tensors()
    with contextlib.ExitStack() as stack:
        stack.callback(torch._C._set_only_lift_cpu_tensors, lift)
        torch._C._set_only_lift_cpu_tensors(True)
        for name, replacement in _torch_cuda(device, count).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        for name, function in _collectives(device).items():
            stack.enter_context(mock.patch.object(torch.distributed, name, function))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", _nothing))  # torch's build for CUDA
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(threading.Thread, "run", thread))
        stack.enter_context(mock.patch.object(JITFunction, "run", launch))
        # Tensors have no content here, so statistics of their values are meaningless.
        stack.enter_context(mock.patch("quire.worker.runner._is_finite", return_value=True))
        stack.callback(triton.runtime.driver.set_active, triton.runtime.driver._active)
        triton.runtime.driver.set_active(_Driver(card))
        stack.enter_context(mock.patch.object(triton.knobs.compilation, "listener", listen))
        stack.enter_context(operations)
        yield device
