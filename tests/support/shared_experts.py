"""Replicas that share experts, as threads of this process: several cores, each with the ranks of its replica."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.engine.assemble import scheduler_limits
from quire.engine.core import EngineCore
from quire.engine.lockstep_base import Lockstep
from quire.lora.gate import AdapterGate
from quire.messages.engine import EngineCoreRequest
from quire.parallel.mesh import Mesh
from quire.scheduler.scheduler import Scheduler
from support.engines import MAX_MODEL_LEN, assert_nothing_is_left, collect
from support.staged_ranks import StagedExecutor
from support.thread_group import Meeting, ThreadGroup
from support.waiting import LONGEST

STEPS_TO_AGREE = 4


class ThreadWaves(Lockstep):
    """The lockstep of cores that are threads. called: the last wave that some core has begun, in a list for all."""

    def __init__(self, group: ThreadGroup, called: list[int]) -> None:
        self.group, self.called = group, called
        self.wave = self.steps = self.dummies = 0

    def connect(self, wake: Callable[[], None]) -> None:
        """The cores look for work all the time."""

    @property
    def is_running(self) -> bool:
        return self.called[0] >= self.wave

    def begin(self) -> None:
        self.called[0] = max(self.called[0], self.wave)

    def count_step(self, is_busy: bool) -> None:
        self.steps += 1
        self.dummies += not is_busy
        if self.steps % STEPS_TO_AGREE == 0 and not any(self.group._exchange(is_busy)):
            self.wave += 1

    def close(self) -> None:
        """Nothing is open."""


class SharedExperts:
    """Cores whose replicas share experts. config: of each, with data_parallel_size and enable_expert_parallel."""

    def __init__(self, config: EngineConfig, path: Path) -> None:
        self.config, count = config, config.parallel.data_parallel_size
        of_replica = config.parallel.ranks
        stages, called = config.parallel.pipeline_parallel_size, [-1]
        of_stage = of_replica // stages
        experts = [Meeting(count * of_stage) for _ in range(stages)]
        everyone, cores = Meeting(count), Meeting(count)
        self._pool = ThreadPoolExecutor(count)

        def make(replica: int) -> EngineCore:
            def among_others(mesh: Mesh) -> Mesh:
                stage, part = divmod(mesh.rank, of_stage)
                group = ThreadGroup(replica * of_stage + part, count * of_stage, None, experts[stage])
                rank = replica * of_replica + mesh.rank
                dp = ThreadGroup(replica, count, None, everyone)
                return replace(mesh, rank=rank, size=count * of_replica, dp=dp, ep=group)

            executor = StagedExecutor(config, path, MAX_MODEL_LEN, among_others=among_others)
            kv = executor.kv_cache
            limits = scheduler_limits(config, MAX_MODEL_LEN)
            lora = config.lora
            adapters = AdapterGate(executor, lora.max_loras, lora.num_in_memory) if lora.enable_lora else None
            scheduler = Scheduler(limits, kv.num_blocks, list(kv.specs), kv.block_size, adapters=adapters)
            return EngineCore(scheduler, executor, ThreadWaves(ThreadGroup(replica, count, None, cores), called))

        self.cores = list(self._pool.map(make, range(count)))
        self.waves: list[ThreadWaves] = [core._lockstep for core in self.cores]

    def run(self, requests: Sequence[Sequence[EngineCoreRequest]]) -> list[dict[str, list[int]]]:
        """Run the requests of each core until all cores pause. Returns the tokens by request id, for each core."""
        begun = threading.Barrier(len(self.cores), timeout=LONGEST)

        def drive(number: int) -> dict[str, list[int]]:
            core, made = self.cores[number], {}
            wave = self.waves[number].wave
            for request in requests[number]:
                core.add_request(request)
            begun.wait()
            while core.has_work or self.waves[number].wave == wave:
                if core.has_work:
                    collect(core, made)
                else:
                    time.sleep(0.001)
            assert_nothing_is_left(core)
            return {name: token_ids for name, (token_ids, _, _) in made.items()}

        return list(self._pool.map(drive, range(len(self.cores))))
