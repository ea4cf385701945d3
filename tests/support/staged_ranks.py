"""An executor whose ranks are threads of this process. They divide stages of a pipeline, contexts and layers."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.executor.base import Executor
from quire.messages.changes import Change, TrainerOrder
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from quire.messages.transfers import Transfer
from quire.parallel.mesh import Communicator, Mesh
from quire.parallel.sizes import MeshSizes
from quire.worker.stage_runner import StageRunner
from quire.worker.worker import Worker
from support.thread_group import Meeting, ThreadGroup, results_of
from support.waiting import LONGEST


class Sent:
    def wait(self) -> None:
        """A queue holds everything."""


@dataclass(frozen=True)
class ThreadLine(Communicator):
    """The ranks with the same number in all stages. queues: what was sent to each of them."""

    queues: Any = None

    def send(self, x: Tensor, to: int) -> Any:
        self.queues[to].put(x.clone())
        return Sent()

    def receive(self, x: Tensor, source: int) -> None:
        x.copy_(self.queues[self.rank].get(timeout=LONGEST))

    def total(self, value: int) -> int:
        return value

    def each(self, value: int) -> tuple[int, ...]:
        return (value,) * self.size


class StagedExecutor(Executor):
    """Runs each step on all ranks, which are threads, with the workers' real runners."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        max_model_len: int,
        meeting: None = None,
        among_others: Callable[[Mesh], Mesh] = lambda mesh: mesh,
    ) -> None:
        """among_others: adds the groups of a rank that contain ranks of other replicas."""
        sizes = msgspec.structs.replace(MeshSizes.of(config.parallel), dp=1)
        groups: list[dict[str, Communicator]] = [{} for _ in range(sizes.world)]
        self._meetings = list[Meeting]()
        for axis in ("pp", "cp", "tp", "ep", "dcp", "replica"):
            for ranks in sizes.groups(axis):
                place, queues = Meeting(len(ranks)), [queue.SimpleQueue[Tensor]() for _ in ranks]
                self._meetings.append(place)
                for number, rank in enumerate(ranks):
                    group = ThreadGroup(number, len(ranks), None, place)
                    line = ThreadLine(number, len(ranks), queues=queues)
                    if len(ranks) > 1:
                        groups[rank][axis] = line if axis == "pp" else group
        meshes = [among_others(Mesh(rank, size=sizes.world, **groups[rank])) for rank in range(sizes.world)]
        self._pool = ThreadPoolExecutor(sizes.world)
        self.ranks = range(sizes.world)
        others = sizes.world // sizes.pp * (sizes.pp - 1)
        self.last, self.others = self.ranks[others:], self.ranks[:others]
        self.workers = self._on(self.ranks, lambda rank: Worker(config, path, max_model_len, meshes[rank]))
        assert len({str(worker.kv_cache) for worker in self.workers}) == 1 or sizes.pp > 1
        self.runners = [worker.runner for worker in self.workers]
        self.kv_cache, self.step_costs = self.workers[-1].kv_cache, self.workers[-1].step_costs

    def _on(self, ranks: range, work: Callable[[int], Any]) -> list[Any]:
        return results_of([self._pool.submit(work, rank) for rank in ranks], self._meetings)

    def submit(self, step: SchedulerOutput) -> None:
        self._on(self.ranks, lambda rank: self.runners[rank].submit(step))

    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Future[ModelRunnerOutput]:
        outputs = self._on(self.last, lambda rank: self.runners[rank].sample(step_id, masks)())
        assert all(output == outputs[0] for output in outputs)

        def take(rank: int) -> None:
            runner = self.runners[rank]
            assert isinstance(runner, StageRunner)
            runner.take(step_id, outputs[0].sampled_token_ids)

        self._on(self.others, take)
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(outputs[0])
        return future

    def load_adapter(self, key: str, path: str) -> Future[None]:
        loaded: Future[None] = Future()
        try:
            for runner in self.runners:
                runner.adapters.load(key, path)
            loaded.set_result(None)
        except ValueError as error:
            loaded.set_exception(error)
        return loaded

    def change(self, change: Change) -> None:
        raise AssertionError("no test changes the memory of these ranks")

    def exchange(self, order: TrainerOrder) -> Any:
        raise AssertionError("no trainer sends these ranks anything")

    def drop_adapter(self, key: str) -> None:
        for runner in self.runners:
            runner.adapters.drop(key)

    def transfer(self, order: Transfer) -> Future[list[int]]:
        raise ValueError("there are no tiers here")

    def check(self) -> None:
        """Faults are raised by the other methods."""

    def shutdown(self) -> None:
        self._pool.shutdown()
