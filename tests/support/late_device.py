"""A device that works late: what a submitted step does happens when its result is demanded, and not before.

A GPU runs behind the host. Here it does so as far as it can, so that a host which needs a result to go on scheduling
(or which changes a message after it was sent) is found out. A host that asks for a result while it could still have
submitted another step gets an error: it would have left the device idle.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

import msgspec

from quire.engine.client import scheduler_limits
from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.executor.base import Executor
from quire.kvcache.specs import KVCacheSize
from quire.messages.engine import EngineCoreOutput, RequestError
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.scheduler import Scheduler, SchedulerLimits
from quire.worker.input_batch import InputBatch
from quire.worker.model_runner import ModelRunner


class WatchedScheduler(Scheduler):
    """Knows whether it could have given another step: not if the last one was empty, and nothing happened since."""

    exhausted = False

    def schedule(self) -> SchedulerOutput:
        step = super().schedule()
        self.exhausted = not step.rows
        return step

    def update(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        self.exhausted = False
        return super().update(output)


class LateResult(Future[ModelRunnerOutput]):
    def __init__(self, executor: LateExecutor, step_id: int) -> None:
        super().__init__()
        self._executor, self._step_id = executor, step_id

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self.set_result(self._executor.demand(self._step_id))
        return super().result(timeout)


class LateExecutor(Executor):
    """Runs a real ModelRunner, as late and in the order that a device would."""

    def __init__(self, runner: ModelRunner, kv_cache: KVCacheSize, scheduler: WatchedScheduler) -> None:
        self.runner, self.kv_cache, self.scheduler = runner, kv_cache, scheduler
        self.most_in_flight = 0
        self._orders: deque[tuple[str, Any]] = deque()  # what the device has yet to do
        self._unread: deque[int] = deque()  # sampled steps whose results the host has not asked for
        batch = runner.batch
        self._checks = InputBatch(
            len(batch.num_tokens), batch.max_model_len, batch.block_size, len(batch.block_tables), batch.vocab_size
        )

    def submit(self, step: SchedulerOutput) -> None:
        for new in step.new_requests:  # on the host, before the launch
            try:
                self._checks.install(new)
            except ValueError as error:
                raise RequestError(new.request_id, str(error)) from error
        self._orders.append(("submit", msgspec.msgpack.encode(step)))

    def sample(self, step_id: int) -> LateResult:
        self._orders.append(("sample", step_id))
        self._unread.append(step_id)
        self.most_in_flight = max(self.most_in_flight, len(self._unread))
        return LateResult(self, step_id)

    def demand(self, step_id: int) -> ModelRunnerOutput:
        depth = self.scheduler.limits.depth
        if len(self._unread) < depth and not self.scheduler.exhausted:
            raise AssertionError(
                f"the result of step {step_id} was read with {len(self._unread)} of {depth} steps in flight"
            )
        assert self._unread.popleft() == step_id, "results are read in order"
        while True:
            kind, order = self._orders.popleft()
            if kind == "submit":
                self.runner.submit(msgspec.msgpack.decode(order, type=SchedulerOutput))
                continue
            output = self.runner.sample(order)
            if order == step_id:
                return output

    def shutdown(self) -> None:
        """Nothing was started."""


def limits_of(llm: LLM, depth: int) -> SchedulerLimits:
    return scheduler_limits(llm.config, llm.max_model_len, depth)


def run_late(llm: LLM, depth: int = 2) -> LateExecutor:
    """Give `llm` a new core over the same model, with `depth` steps in flight on a late device."""
    kv, cache = llm.core.executor.kv_cache, llm.config.cache
    scheduler = WatchedScheduler(
        limits_of(llm, depth), kv.num_blocks, list(kv.specs), cache.block_size, cache.enable_prefix_caching
    )
    executor = LateExecutor(llm.core.executor.runner, kv, scheduler)
    llm.core = EngineCore(scheduler, executor)
    return executor
