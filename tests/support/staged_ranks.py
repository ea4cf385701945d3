"""An executor whose ranks are threads of this process: stages of a pipeline, each with a tensor-parallel group."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from quire.parallel.mesh import Communicator, Mesh
from quire.worker.stage_runner import StageRunner
from quire.worker.worker import Worker
from support.thread_group import Meeting, ThreadGroup


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
        x.copy_(self.queues[self.rank].get(timeout=30))

    def total(self, value: int) -> int:
        return value


class StagedExecutor(Executor):
    """Runs each step on all ranks, which are threads, with the workers' real runners."""

    def __init__(
        self, config: EngineConfig, path: Path, max_model_len: int, meeting: None = None,
        among_others: Callable[[Mesh], Mesh] = lambda mesh: mesh,
    ) -> None:  # fmt: skip
        """among_others: adds the groups of a rank that contain ranks of other replicas."""
        stages, ranks = config.parallel.pipeline_parallel_size, config.parallel.tensor_parallel_size
        lines = [[queue.SimpleQueue[Tensor]() for _ in range(stages)] for _ in range(ranks)]
        everyone, groups = Meeting(stages * ranks), [Meeting(ranks) for _ in range(stages)]

        def mesh(rank: int) -> Mesh:
            stage, part = divmod(rank, ranks)
            return Mesh(
                rank, size=stages * ranks, pp=ThreadLine(stage, stages, queues=lines[part]),
                tp=ThreadGroup(part, ranks, None, groups[stage]) if ranks > 1 else Communicator(),
                replica=ThreadGroup(rank, stages * ranks, None, everyone),
            )  # fmt: skip

        self._pool = ThreadPoolExecutor(stages * ranks)
        self.ranks = range(stages * ranks)
        self.last, self.others = self.ranks[-ranks:], self.ranks[:-ranks]
        workers = self._on(self.ranks, lambda rank: Worker(config, path, max_model_len, among_others(mesh(rank))))
        self.runners = [worker.runner for worker in workers]
        self.kv_cache, self.step_costs = workers[-1].kv_cache, workers[-1].step_costs

    def _on(self, ranks: range, work: Callable[[int], Any]) -> list[Any]:
        return [future.result() for future in [self._pool.submit(work, rank) for rank in ranks]]

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
        for runner in self.runners:
            assert runner.adapters is not None
            runner.adapters.load(key, path)
        loaded.set_result(None)
        return loaded

    def drop_adapter(self, key: str) -> None:
        for runner in self.runners:
            assert runner.adapters is not None
            runner.adapters.drop(key)

    def shutdown(self) -> None:
        self._pool.shutdown()
