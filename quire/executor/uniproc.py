"""The executor of a single device, whose worker runs in this process."""

import gc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.executor.base import DeferredKernels, Executor
from quire.messages.changes import Change, TrainerOrder
from quire.messages.engine import RendezvousPlace
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from quire.messages.transfers import Transfer
from quire.ops.cpu import build
from quire.parallel.mesh import Mesh, connect_store, join
from quire.parallel.sizes import MeshSizes
from quire.worker.device import on_gpu
from quire.worker.worker import Worker


class _Read(Future[ModelRunnerOutput]):
    """A result that is read from the device when `result` is called."""

    def __init__(self, read: Callable[[], ModelRunnerOutput]) -> None:
        super().__init__()
        self._read = read

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self.set_result(self._read())
        return super().result(timeout)


class UniprocExecutor(Executor):
    """Calls the worker directly. On a CPU, the forward is done when `submit` returns."""

    def __init__(
        self, config: EngineConfig, directory: Path, max_model_len: int, place: RendezvousPlace | None = None
    ) -> None:
        """place: the rendezvous of replicas that share experts, None for a replica that shares none."""
        mesh = Mesh()
        if place is not None:
            kind = "cuda" if on_gpu(config.kernels.device) else "cpu"
            alone = range(place.replica, place.replica + 1)
            store = connect_store(place.address, place.secret, place.generation)
            mesh = join(MeshSizes.of(config.parallel), place.replica, "", 0, kind, store, alone, frozenset(alone))
        self._make_worker = partial(Worker, directory=directory, max_model_len=max_model_len, mesh=mesh)
        self._config = config
        self._take(self._make_worker(config))
        if self.runs_reference and (background := build.background()) is not None:
            self.deferred_kernels = DeferredKernels(background, self._use_compiled)
        self._loader = ThreadPoolExecutor(1, "quire-loader")  # starts a thread when it is used

    def _take(self, worker: Worker) -> None:
        self._worker = worker
        self.runner = worker.runner
        self.kv_cache = worker.kv_cache
        self.step_costs = worker.step_costs
        self._transfers = worker.transfers
        kernels = worker.model.kernels
        self.runs_reference = kernels.target.device.type == "cpu" and kernels.chosen["linear"] == "reference"

    def _use_compiled(self) -> None:
        size = self.kv_cache
        del self._worker, self.runner  # memory may not suffice for both models
        gc.collect()
        cache = replace(self._config.cache, num_gpu_blocks_override=size.num_blocks)
        self._take(self._make_worker(replace(self._config, cache=cache)))
        assert self.kv_cache.block_size == size.block_size
        assert list(self.kv_cache.specs) == list(size.specs)

    def submit(self, step: SchedulerOutput) -> None:
        self.runner.submit(step)

    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Future[ModelRunnerOutput]:
        return _Read(self.runner.sample(step_id, masks))

    def load_adapter(self, key: str, path: str) -> Future[None]:
        return self._loader.submit(self.runner.adapters.load, key, path)

    def drop_adapter(self, key: str) -> None:
        self.runner.adapters.drop(key)

    def change(self, change: Change) -> None:
        self._worker.change(change)

    def exchange(self, order: TrainerOrder) -> Future[None]:
        return self._loader.submit(self._worker.resident_memory.exchange, order)

    def transfer(self, order: Transfer) -> Future[list[int]]:
        assert self._transfers is not None
        return self._transfers.submit(order)

    def check(self) -> None:
        """Do nothing: failures are raised by the other methods."""

    def shutdown(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
        if self._transfers is not None:
            self._transfers.close()
