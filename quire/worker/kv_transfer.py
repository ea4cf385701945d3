"""The workers' half of the tiers: each rank copies its part of blocks between its KV cache and CPU memory or disk."""

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kv.tiers import rank_region
from quire.messages.errors import error_text
from quire.messages.transfers import Transfer
from quire.observability.logging import logger

WHOLE = slice(None)
Bytes = TypeVar("Bytes", Tensor, npt.NDArray[np.uint8])


def moment(device: torch.device) -> Callable[[], None]:
    """Called on the thread that submits steps. The returned function waits until all work submitted so far has run."""
    if device.type != "cuda":
        return lambda: None
    submitted = torch.cuda.Event()  # type: ignore[no-untyped-call]
    submitted.record(torch.cuda.current_stream(device))
    return submitted.synchronize


def matching(block: Bytes, data: Bytes, span: slice) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield the memory of the block's bytes within the span, and the same bytes of `data`, in as many pieces as the
    block's memory has. block: [block_bytes] or [parts, bytes of a part], see KVMemory. data: [block_bytes]."""
    if block.ndim == 1:
        yield block[span], data[span]
        return
    if span == WHOLE:
        yield block, data.reshape(block.shape)
        return
    parts, size = block.shape
    first, stop, _ = span.indices(parts * size)
    for part in range(first // size, -(-stop // size)):
        start = part * size
        begin = max(first, start)
        end = min(stop, start + size)
        yield block[part, begin - start : end - start], data[begin:end]


class Rows(ABC):
    """Copies single blocks between a rank's KV cache and tensors in CPU memory, on any thread.

    The scheduler holds the blocks during the copy, and names only blocks whose step has already been submitted.
    """

    def __init__(self, blocks: Tensor) -> None:
        """blocks: uint8, see KVMemory."""
        self.blocks = blocks
        self.block_bytes = blocks[0].numel()

    @property
    def are_adjacent(self) -> bool:
        """Whether the bytes of a block are adjacent in memory, and follow those of the block before."""
        return self.blocks.dim() == 2

    @staticmethod
    def of(blocks: Tensor) -> "Rows":
        return DeviceRows(blocks) if blocks.device.type == "cuda" else HostRows(blocks)

    def mark(self) -> Callable[[], None]:
        """Called on the thread that submits steps. The returned function makes the results of all steps submitted so
        far visible to its calling thread."""
        return lambda: None

    @abstractmethod
    def pin(self, memory: Tensor) -> None:
        """Prepare CPU memory for fast copies."""

    @abstractmethod
    def read(self, block_ids: Sequence[int], targets: Sequence[Tensor], span: slice = WHOLE) -> None:
        """Copy block block_ids[i], or a span of its bytes, to targets[i], uint8 [block_bytes]. Returns when the copy is
        complete."""

    @abstractmethod
    def write(self, block_ids: Sequence[int], sources: Sequence[Tensor], span: slice = WHOLE) -> None:
        """Copy sources[i], or a span of its bytes, to block block_ids[i]. Returns when the copy is complete."""


class HostRows(Rows):
    """Copies with one thread, since the steps need the others. numpy releases the GIL during a copy."""

    def __init__(self, blocks: Tensor) -> None:
        super().__init__(blocks)
        self._rows = blocks.numpy()

    def pin(self, memory: Tensor) -> None:
        """Do nothing: copies within CPU memory need no preparation."""

    def read(self, block_ids: Sequence[int], targets: Sequence[Tensor], span: slice = WHOLE) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            for stored, copied in matching(self._rows[block_id], target.numpy(), span):
                np.copyto(copied, stored)

    def write(self, block_ids: Sequence[int], sources: Sequence[Tensor], span: slice = WHOLE) -> None:
        for block_id, source in zip(block_ids, sources, strict=True):
            for stored, given in matching(self._rows[block_id], source.numpy(), span):
                np.copyto(stored, given)


class DeviceRows(Rows):
    """Copies on a separate stream, concurrently with the steps."""

    def __init__(self, blocks: Tensor) -> None:
        super().__init__(blocks)
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]

    def mark(self) -> Callable[[], None]:
        submitted = torch.cuda.Event()  # type: ignore[no-untyped-call]
        submitted.record(torch.cuda.current_stream(self.blocks.device))
        return lambda: self._stream.wait_event(submitted)

    def pin(self, memory: Tensor) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) != 0:
            _clear_error(self.blocks.device)
            logger.warning(
                "%d MiB of memory for KV blocks cannot be pinned (CUDA error %d), so copies to the GPU are slower",
                memory.nbytes >> 20,
                int(status),
            )

    def read(self, block_ids: Sequence[int], targets: Sequence[Tensor], span: slice = WHOLE) -> None:
        with torch.cuda.stream(self._stream):
            for block_id, target in zip(block_ids, targets, strict=True):
                for stored, copied in matching(self.blocks[block_id], target, span):
                    copied.copy_(stored, non_blocking=True)
        self._stream.synchronize()

    def write(self, block_ids: Sequence[int], sources: Sequence[Tensor], span: slice = WHOLE) -> None:
        with torch.cuda.stream(self._stream):
            for block_id, source in zip(block_ids, sources, strict=True):
                for stored, given in matching(self.blocks[block_id], source, span):
                    stored.copy_(given, non_blocking=True)
        self._stream.synchronize()


class Store(ABC):
    """One rank's part of a tier. `save` and `load` return the indices of the blocks that they failed to copy.

    load_threads: how many threads may call `load` at the same time.
    """

    load_threads = 1

    @abstractmethod
    def save(self, rows: Rows, order: Transfer) -> list[int]: ...

    @abstractmethod
    def load(self, rows: Rows, order: Transfer) -> list[int]: ...

    def close(self) -> None:  # noqa: B027
        """Cancel transfers in progress, and close open files and connections."""


class MemoryStore(Store):
    """Slots in CPU memory: in a file that another process owns, or in this process."""

    def __init__(self, num_slots: int, rank_bytes: Sequence[int], rank: int, memory: Path | None) -> None:
        """rank_bytes: the bytes of one block on each rank. memory: the file, which also contains the slots of other
        ranks; None for memory of this process. Raises OSError."""
        block_bytes = rank_bytes[rank]
        if memory is None:
            region = mmap.mmap(-1, max(1, num_slots * block_bytes))
            start = 0
        else:
            start, stop = rank_region(num_slots, rank_bytes, rank)
            handle = os.open(memory, os.O_RDWR)
            try:
                region = mmap.mmap(handle, stop)
            finally:
                os.close(handle)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                region.madvise(mmap.MADV_HUGEPAGE)  # the first touch of a small page costs more than the copy
        flat = torch.frombuffer(region, dtype=torch.uint8, count=num_slots * block_bytes, offset=start)
        self.slots = flat.view(num_slots, block_bytes)

    def save(self, rows: Rows, order: Transfer) -> list[int]:
        rows.read(order.block_ids, [self.slots[slot] for slot in order.slots])
        return []

    def load(self, rows: Rows, order: Transfer) -> list[int]:
        rows.write(order.block_ids, [self.slots[slot] for slot in order.slots])
        return []


class KVTransfers:
    """Carries out transfers on separate threads for each tier, so that loads do not wait for other tiers or for saves.
    The step that fills a saved block must have been submitted before `submit` is called: see `Rows.mark`."""

    def __init__(self, blocks: Tensor, stores: Sequence[Store]) -> None:
        self.rows = Rows.of(blocks)
        self._stores = stores
        self._is_closed = False
        self._threads = {
            (number, is_load): ThreadPoolExecutor(
                store.load_threads if is_load else 1, f"quire-kv-{'load' if is_load else 'save'}-{number}"
            )
            for number, store in enumerate(stores)
            for is_load in (False, True)
        }

    def submit(self, order: Transfer) -> Future[list[int]]:
        """Start a transfer. The result contains the indices of the blocks that could not be copied."""
        return self._threads[order.tier, order.is_load].submit(self._run, order, self.rows.mark())

    def _run(self, order: Transfer, see_steps: Callable[[], None]) -> list[int]:
        if self._is_closed:
            return list(range(len(order.keys)))
        store = self._stores[order.tier]
        try:
            if order.is_load:
                return store.load(self.rows, order)
            see_steps()
            return store.save(self.rows, order)
        except Exception as error:
            logger.exception("KV blocks could not be copied: %s", error_text(error))
            return list(range(len(order.keys)))

    def close(self) -> None:
        """Stop the threads. Transfers that have not begun fail."""
        self._is_closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=False)
        for store in self._stores:
            store.close()


def _clear_error(device: torch.device) -> None:
    """Clear the last CUDA error of this thread. Otherwise, the next launch would report it as its own: torch checks for
    errors after launches only, and each check clears the error."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
