"""The weights and KV cache in a rank's memory, which can be released temporarily; weights can also be replaced."""

import ctypes
import mmap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from quire.checkpoints.weights import Checkpoint
from quire.config.conflicts import check
from quire.config.engine import EngineConfig
from quire.config.features import Operation, Setup
from quire.layers.lora import AdapterSlots, LowRank
from quire.messages.changes import MemoryChange, ReadWeights, Sleep, TakeWeights, TrainerOrder, WakeUp
from quire.models.description import describe
from quire.models.model import LoadedModel
from quire.ops import Kernels
from quire.ops.memory import lasting
from quire.parallel.mesh import Communicator
from quire.worker.forward import Forward
from quire.worker.graphs import CapturedForward
from quire.worker.kv_memory import KVMemory

_DONTNEED = 4  # for Linux's madvise: frees the pages; when touched again, they are zeros


class Store(Protocol):
    """Releases and restores the memory of tensors that stay alive."""

    def release(self, storage: UntypedStorage, keep: bool) -> None:
        """keep: whether `restore` restores the values."""

    def restore(self, storage: UntypedStorage) -> None: ...


class HostPages:
    """Memory of the host. Addresses stay valid; preserved values stay in place."""

    def release(self, storage: UntypedStorage, keep: bool) -> None:
        if not keep:
            first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if size > 0:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _DONTNEED)

    def restore(self, storage: UntypedStorage) -> None:
        pass


class DeviceMemory:
    """Memory of a GPU. Preserved values are moved to the host. Addresses change."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, UntypedStorage | None]] = {}  # by storage: its size and values

    def release(self, storage: UntypedStorage, keep: bool) -> None:
        size, values = self._kept.get(storage._cdata, (storage.nbytes(), None))
        if keep and storage.nbytes():
            values = UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            values.copy_(storage)
        self._kept[storage._cdata] = size, values if keep else None
        storage.resize_(0)

    def restore(self, storage: UntypedStorage) -> None:
        size, values = self._kept.pop(storage._cdata)
        storage.resize_(size)
        if values is not None:
            storage.copy_(values)


def weights_of(loaded: LoadedModel) -> list[Tensor]:
    """Return the weights of a model that has just been loaded: all tensors that it has by then. Tensors loaded later
    are not released."""
    lasting.seal()
    return list(_tensors(loaded, set()))


class ResidentMemory:
    """Carries out the executor's changes."""

    def __init__(
        self,
        loaded: LoadedModel,
        weights: list[Tensor],
        kv_memory: KVMemory,
        forward: Forward,
        config: EngineConfig,
        directory: Path,
        load: Callable[[Path | Checkpoint | None], LoadedModel],
        rank: int = 0,
    ) -> None:
        """weights: see weights_of. load: loads the same model again, with the given weights, those from a folder, or
        (None) the model's own. rank: the number of this rank in its replica."""
        self._loaded = loaded
        self._config = config
        self._directory = directory
        self._load = load
        self._weights = weights
        self._is_gpu = loaded.model.kernels.target.device.type == "cuda"
        self._store: Store = DeviceMemory() if self._is_gpu else HostPages()
        self._cache = [kv_memory.blocks.untyped_storage()]
        self._kv_memory = kv_memory
        self._forward = forward
        self._level = 0  # the sleep level of the weights; 0 while they are in memory
        self._has_cache = True
        self._source: ReadWeights | None = None  # of the weights in use, if they are not the model's own
        self._staged: tuple[ReadWeights, LoadedModel] | None = None
        self._rank = rank
        self._groups: Any = None  # those of trainers, created when first needed

    def change(self, change: MemoryChange) -> None:
        """Carry out a change. Raises ValueError or OSError if it fails; then nothing has changed."""
        if self._loaded.weight_cache is not None:
            self._loaded.weight_cache.stop()
        if isinstance(change, Sleep):
            self._sleep(change.level)
        elif isinstance(change, WakeUp):
            self._wake_up(change)
        elif isinstance(change, ReadWeights):
            self._read(change)
        else:
            self._take(change)

    def exchange(self, order: TrainerOrder) -> None:
        """Join a trainer's group, or receive weights for a later `ReadWeights`. Called on a different thread than
        `change`. Raises ValueError if it fails."""
        if self._groups is None:
            self._check_replaceable()
            from quire.worker.weight_groups import WeightGroups  # imports networking modules

            device = self._loaded.model.kernels.target.device
            self._groups = WeightGroups(device, self._rank, self._directory, self._loaded.parts)
        self._groups.exchange(order)

    def _storages(self) -> list[UntypedStorage]:
        return list({t.untyped_storage()._cdata: t.untyped_storage() for t in self._weights}.values())

    def _sleep(self, level: int) -> None:
        check(Setup(self._config, operation=Operation(drops_weights=level == 2)))
        for storage in self._storages() if level > self._level else ():
            self._store.release(storage, keep=level == 1)
        for storage in self._cache if self._has_cache else ():
            self._store.release(storage, keep=False)
        if self._has_cache:
            self._kv_memory.give_back()
        self._level = max(level, self._level)
        self._has_cache = False
        if self._is_gpu:
            torch.cuda.empty_cache()

    def _wake_up(self, wanted: WakeUp) -> None:
        if wanted.weights and self._level == 2 and self._source is not None and self._source.received:
            raise ValueError("the weights were sent by a process group; send them again, which wakes them up")
        if wanted.weights and self._level:
            self._restore_weights()
            if self._level == 2:
                self._copy(self._load(None if self._source is None else Path(self._source.directory)))
            self._level = 0
        if wanted.kv_cache and not self._has_cache:
            for storage in self._cache:
                self._store.restore(storage)
                if self._is_gpu or self._config.cache.kv_cache_pretouch:
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
            self._has_cache = True
        if not self._level and self._has_cache and isinstance(self._forward, CapturedForward):
            self._forward.capture()  # the graphs contain addresses of weights and cache

    def _restore_weights(self) -> None:
        for storage in self._storages():
            self._store.restore(storage)

    def _read(self, change: ReadWeights) -> None:
        self._staged = None
        folder = Path(change.directory)
        if not change.received and not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        self._check_replaceable()
        options = self._config.model
        if (folder / "config.json").is_file() and describe(folder, options).spec != describe(
            self._directory, options
        ).spec:
            raise ValueError(f"config.json in {folder} describes another model")
        try:
            new = self._load(self._groups.received if change.received else folder)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                "there is no memory for the new weights beside the old ones; sleep at level 2 first"
            ) from error
        self._check_form(list(_tensors(new, set())))
        self._staged = change, new

    def _check_form(self, new: list[Tensor]) -> None:
        """Raises ValueError if the new weights cannot be copied over the current ones. The tensors of quantized weights
        depend on their values: they may have offsets or not, and scales of 16 or 32 bits."""
        if [tensor.shape for tensor in new] != [tensor.shape for tensor in self._weights] or not all(
            made.dtype is old.dtype or torch.equal(made.to(old.dtype).to(made.dtype), made)
            for old, made in zip(self._weights, new, strict=True)
        ):
            raise ValueError(
                "the new weights are quantized in another way than those in use, such as with zero points "
                "or with finer scales; start an engine with them"
            )

    def _check_replaceable(self) -> None:
        """Raises ValueError if the weights cannot be replaced."""
        if self._directory.is_file():
            raise ValueError("the weights of a GGUF file cannot be replaced")
        check(Setup(self._config, operation=Operation(replaces_weights=True)))

    def _take(self, change: TakeWeights) -> None:
        staged = self._staged
        self._staged = None
        if self._groups is not None:
            self._groups.forget()
        if not change.use or staged is None:
            return
        if self._level:
            self._restore_weights()
        self._source, model = staged
        self._copy(model)
        self._level = 0

    @torch.inference_mode()
    def _copy(self, new_model: LoadedModel) -> None:
        """Copy another model's weights into the current ones, in place, since recorded steps and CUDA graphs contain
        their addresses."""
        for old, new in zip(self._weights, _tensors(new_model, set()), strict=True):
            old.copy_(new)


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield all tensors of a model except its adapters, each once, in an order that is the same for equal models."""
    if id(thing) in seen or isinstance(thing, (Kernels, Communicator, AdapterSlots, LowRank, type)):
        return
    seen.add(id(thing))
    parts: Any = ()
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, (list, tuple)):
        parts = thing
    elif isinstance(thing, partial):
        parts = (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, MethodType):
        parts = (thing.__self__,)
    elif isinstance(thing, FunctionType):
        parts = [cell.cell_contents for cell in thing.__closure__ or ()]
    elif type(thing).__module__.startswith("quire"):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
    for part in parts:
        yield from _tensors(part, seen)
