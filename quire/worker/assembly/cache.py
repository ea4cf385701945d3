"""Allocates the KV cache of a rank: as many blocks as memory allows on all ranks."""

from dataclasses import dataclass
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.kv.specs import KVCacheSize
from quire.parallel.mesh import Mesh
from quire.platform.limits import free_on_host
from quire.worker import memory
from quire.worker.assembly.loading import LoadedRank
from quire.worker.graphs import CapturedForward
from quire.worker.kv_memory import KVMemory
from quire.worker.runner import Runner
from quire.worker.warm_up import warm_up


@dataclass(frozen=True)
class RankCache:
    """memory: this rank's cache memory. size: the size of the cache on all ranks."""

    memory: KVMemory
    size: KVCacheSize


@dataclass(frozen=True)
class GpuRoom:
    """The GPU memory of a rank. budget: bytes that it may use. gauge: made before the weights are loaded."""

    budget: int
    gauge: memory.Gauge


def make_cache(
    config: EngineConfig, mesh: Mesh, loaded: LoadedRank, runner: Runner[Any], room: GpuRoom | None
) -> RankCache:
    """Allocate the cache, and bind the model to it. All ranks of a replica call this together.

    room: on a GPU, the memory for this rank. Raises ConfigError if the cache does not fit into memory.
    """
    plan = loaded.plan
    device = runner.device.torch_device
    rank_bytes = mesh.replica.each(loaded.block_bytes)
    if room is not None:
        free = _free_on_gpu(config, loaded, runner, room)
    else:
        free = _free_on_host(config, mesh, loaded)
        free -= config.cache.kv_offloading_bytes * loaded.block_bytes // sum(rank_bytes)
    tables = [group.spec.table_length(runner.batch.max_model_len, plan.block_size) for group in plan.groups]
    useful = config.scheduler.max_num_seqs * sum(tables) + 1
    num_blocks = memory.num_blocks(config, free, loaded.block_bytes, useful, device)
    num_blocks = mesh.replica.minimum(num_blocks)
    kv_memory = _allocate(config, loaded, num_blocks, device)
    if config.cache.kv_cache_pretouch:
        kv_memory.blocks.zero_()
    dtype = plan.kernels.target.dtype
    layout = "; ".join(f"{backend.name}, {dtype}, {backend.layout}" for backend in loaded.backends)
    specs = tuple(group.spec for group in plan.groups)
    return RankCache(kv_memory, KVCacheSize(num_blocks, rank_bytes, specs, layout, plan.block_size))


def _free_on_gpu(config: EngineConfig, loaded: LoadedRank, runner: Runner[Any], room: GpuRoom) -> int:
    """Run the largest step, capture CUDA graphs as a trial, and return the bytes that all of this leaves free."""
    most_tokens = loaded.plan.most_tokens
    _allocate(config, loaded, 1, runner.device.torch_device)  # the dummy step needs a null block
    tokens = min(most_tokens, config.scheduler.max_num_seqs * runner.batch.max_model_len)
    encoders = config.multimodal.limits(most_tokens, most_tokens)
    step = memory.largest_step(runner, tokens, encoders)
    warm_up(runner, tokens)
    graphs = runner.forward.trial() if isinstance(runner.forward, CapturedForward) else 0
    return memory.left_for_cache(room.budget, room.gauge.used(), step, graphs)


def _free_on_host(config: EngineConfig, mesh: Mesh, loaded: LoadedRank) -> int:
    """Return this rank's share of the machine's free memory."""
    together = mesh.ranks_on_machine
    cached = loaded.target.weight_cache
    free = free_on_host(0 if cached is None else cached.mapped * together)  # replicas map the same files
    return free // (together * max(1, len(config.layout.here)))


def _allocate(config: EngineConfig, loaded: LoadedRank, num_blocks: int, device: torch.device) -> KVMemory:
    transfer = config.cache.transfer
    shared = device.type == "cpu" and transfer is not None and transfer.produces
    parts = loaded.parts_of_a_block() if config.cache.kv_cache_layout == "layer_by_layer" else 1
    kv_memory = KVMemory(num_blocks, loaded.block_bytes, device, shared, parts)
    loaded.bind_cache(kv_memory.blocks)
    return kv_memory
