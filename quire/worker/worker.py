"""The worker of one rank: its device, its part of the model, and its KV cache."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quire.config.conflicts import check
from quire.config.engine import EngineConfig
from quire.config.features import Place, Setup
from quire.messages.changes import Change, Profile
from quire.messages.step import StepCosts
from quire.observability.logging import logger
from quire.ops.compiler import hidden
from quire.ops.memory import keep_what_is_freed
from quire.parallel.mesh import Mesh
from quire.worker import memory
from quire.worker.assembly.cache import GpuRoom, make_cache
from quire.worker.assembly.execution import make_runner
from quire.worker.assembly.loading import load_rank
from quire.worker.device import choose_device
from quire.worker.graphs import CapturedForward
from quire.worker.resident_memory import ResidentMemory
from quire.worker.runner import Runner
from quire.worker.step_clock import StepClock
from quire.worker.step_costs import step_costs
from quire.worker.tiers import kv_transfers

if TYPE_CHECKING:
    from quire.observability.profiling.rank import RankProfiler


class Worker:
    """Loads the model and allocates the cache. Its `runner` then executes the steps according to `plan`."""

    def __init__(self, config: EngineConfig, directory: Path, max_model_len: int, mesh: Mesh) -> None:
        """Raises ConfigError if the KV cache does not fit into memory, if the model cannot use its type, or if ranks
        would share a GPU but must not."""
        if config.model.torch_compile:
            shortcut = hidden(mesh.tp.shortcut, "all_reduce", "reduce_scatter", "all_gather")
            mesh = replace(mesh, tp=replace(mesh.tp, shortcut=shortcut))
        self.device = choose_device(config.kernels.device, mesh)
        device = self.device.torch_device
        room = _room(config, mesh, device)
        loaded = load_rank(config, directory, max_model_len, device, mesh)
        self.plan = loaded.plan
        self.loaded = loaded.target
        self.model = loaded.model
        self.drafter = loaded.drafter
        self.runner = make_runner(config, max_model_len, self.device, mesh, loaded)
        cache = make_cache(config, mesh, loaded, self.runner, room)
        self.kv_memory = cache.memory
        self.kv_cache = cache.size
        forward = self.runner.forward
        self.resident_memory = ResidentMemory(
            loaded.target, loaded.weights, cache.memory, forward, config, directory, loaded.load, mesh.replica.rank
        )
        if device.type == "cpu":
            keep_what_is_freed()  # called now, after the memory used for loading has been freed
        if isinstance(forward, CapturedForward):
            forward.capture()
            torch.cuda.empty_cache()  # frees the memory of the eager runs that came before each capture
        clock = self.runner.clock if isinstance(self.runner.clock, StepClock) else None
        self.transfers = kv_transfers(config, directory, cache.size, cache.memory, self.plan.backends, mesh, clock)
        self._rank = mesh.replica.rank
        self._profiler: RankProfiler | None = None
        if config.profile.enable_layerwise_nvtx_tracing:
            from quire.observability.profiling.ranges import mark_rank

            mark_rank(self.runner, config.model.torch_compile)
        self.step_costs = _step_costs(config, mesh, self.runner, self.plan.most_tokens)

    def change(self, change: Change) -> None:
        """Carry out a change. Raises ValueError or OSError if it fails; then nothing has changed."""
        if isinstance(change, Profile):
            from quire.observability.profiling.rank import RankProfiler

            self._profiler = self._profiler or RankProfiler(self.runner, self._rank)
            self._profiler.obey(change)
        else:
            self.runner.expect_new_weights()
            self.resident_memory.change(change)


def _room(config: EngineConfig, mesh: Mesh, device: torch.device) -> GpuRoom | None:
    """Return the GPU memory that each rank of the replica may use; None on a CPU.

    Raises ConfigError if ranks share a GPU but must not, or if other processes use it.
    """
    on_cpu = device.type == "cpu"
    sharing = 1 if on_cpu else mesh.ranks_on_device(device.type)
    check(Setup(config, place=Place(on_cpu=on_cpu, shares_gpu=sharing > 1)))
    if on_cpu:
        return None
    if sharing > 1 and mesh.rank == 0:
        logger.warning(
            "%d ranks share a GPU: they exchange tensors through the host, without CUDA graphs; give each its own",
            sharing,
        )
    budget = mesh.replica.minimum(memory.budget(config, device, sharing))
    return GpuRoom(budget, memory.Gauge(device, sharing))


def _step_costs(config: EngineConfig, mesh: Mesh, runner: Runner[Any], most_tokens: int) -> StepCosts:
    """Return the measured times of steps, if the number of drafts depends on them."""
    options = config.scheduler.speculation
    if options is None or not options.adaptive or config.model.runner == "pooling":
        return StepCosts()
    return step_costs(runner, most_tokens, options.num_speculative_tokens, mesh.replica)
