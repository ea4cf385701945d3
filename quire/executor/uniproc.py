"""The executor of one device: the worker lives in this process."""

from concurrent.futures import Future
from pathlib import Path

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.parallel.mesh import TensorGroup
from quire.worker.worker import Worker


class UniprocExecutor(Executor):
    """Calls the worker directly. On a CPU a submitted step is over when `submit` returns."""

    def __init__(self, config: EngineConfig, directory: Path, max_model_len: int) -> None:
        worker = Worker(config, directory, max_model_len, TensorGroup())
        self.runner, self.kv_cache = worker.runner, worker.kv_cache

    def submit(self, step: SchedulerOutput) -> None:
        self.runner.submit(step)

    def sample(self, step_id: int) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self.runner.sample(step_id))
        return future

    def shutdown(self) -> None:
        """Nothing was started."""
