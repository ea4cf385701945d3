"""The memory of the simulated GPU, for tests of what happens when it is used up."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MIB = 2**20


@dataclass
class SimulatedMemory:
    """Counts the bytes of tensors that exist. All sizes are in bytes.

    context: used by CUDA itself. graph: used by each captured graph, besides the memory of its tensors. others: used
    outside of torch, such as by NCCL.
    """

    total: int
    context: int = 512 * _MIB
    graph: int = 4 * _MIB
    others: int = 0
    allocated: int = 0
    peak: int = 0
    num_graphs: int = 0
    is_capturing: bool = False
    _pool: int = 0  # of the memory that graphs share, which is kept until no graph exists
    _in_pool: int = 0  # of tensors there
    _storages: set[int] = field(default_factory=set, repr=False)

    @property
    def free(self) -> int:
        used = self.context + self.others + self.allocated + self._pool + self.num_graphs * self.graph
        return self.total - used

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's memory until it is freed. Raises torch.OutOfMemoryError if there is too little."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = -(-storage.nbytes() // 512) * 512
        growth = max(0, self._in_pool + size - self._pool) if self.is_capturing else size
        if growth > self.free:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / _MIB:.2f} MiB, of which {self.free / _MIB:.2f} are free"
            )
        self._storages.add(key)
        weakref.finalize(storage, self._drop, key, size, self.is_capturing)
        if self.is_capturing:
            self._in_pool += size
            self._pool += growth
        else:
            self.allocated += size
            self.peak = max(self.peak, self.allocated)

    def _drop(self, key: int, size: int, is_in_pool: bool) -> None:
        self._storages.discard(key)
        if is_in_pool:
            self._in_pool -= size
            self._free_pool()
        else:
            self.allocated -= size

    def add_graph(self, graph: object) -> None:
        """Count a captured graph until it is freed. Raises torch.OutOfMemoryError."""
        if self.free < self.graph:
            raise torch.OutOfMemoryError("CUDA out of memory: a graph cannot be instantiated")
        self.num_graphs += 1
        weakref.finalize(graph, self._drop_graph)

    def _drop_graph(self) -> None:
        self.num_graphs -= 1
        self._free_pool()

    def _free_pool(self) -> None:
        if not self.num_graphs and not self.is_capturing:
            self._pool = self._in_pool

    def reset_peak(self) -> None:
        self.peak = self.allocated
