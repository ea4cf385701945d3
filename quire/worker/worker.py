"""One rank: its device, its share of the model, its KV cache."""

import time
from pathlib import Path

import psutil
import torch

from quire.attention.base import AttentionShape
from quire.attention.cells import CELLS
from quire.attention.selection import choose_backend
from quire.config import ConfigError, EngineConfig
from quire.kvcache.specs import KVCacheSize
from quire.layers.attention import AttentionSpec
from quire.metrics.logging import logger
from quire.models.load import load_model
from quire.models.spec import DecoderSpec
from quire.parallel.mesh import TensorGroup
from quire.sampling.sampler import Sampler
from quire.worker.graphs import Graphs
from quire.worker.input_batch import InputBatch
from quire.worker.model_runner import ModelRunner

_FREE_SHARE = 0.5  # of the memory that is free, unless --kv-cache-memory-bytes says how much


class Worker:
    """Loads the model and makes the cache; from then on its `runner` executes steps."""

    def __init__(self, config: EngineConfig, directory: Path, max_model_len: int, group: TensorGroup) -> None:
        """Raises ConfigError if the cache that was asked for does not fit memory, or its type the model."""
        device = torch.device("cpu")
        started = time.perf_counter()
        model = load_model(directory, config, max_model_len, device, group, show_progress=group.rank == 0)
        spec, dtype = model.spec, model.kernels.target.dtype
        block_size, max_num_seqs = config.cache.block_size, config.scheduler.max_num_seqs
        c = model.cache_shape
        cell = _cell(config, spec)
        shape = AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, block_size, dtype, device, c.value_dim, cell)
        backend = choose_backend(shape, config.kernels.attention_backend)
        if group.rank == 0:
            seconds = time.perf_counter() - started
            logger.info("Model ready in %.1f s: %s, attention %s", seconds, str(dtype)[6:], backend.name)

        num_tensors = max(len(kv_spec.layers) for kv_spec in model.kv_specs)
        block_bytes = backend.block_bytes() * num_tensors
        useful = max_num_seqs * len(model.kv_specs) * -(-max_model_len // block_size) + 1
        num_blocks = group.minimum(_num_blocks(config, block_bytes, useful, group.size))
        caches = [backend.allocate(num_blocks) for _ in range(num_tensors)]
        if config.cache.kv_cache_pretouch:
            for cache in caches:
                cache.zero_()
        model.bind_cache(backend, caches)
        batch = InputBatch(max_num_seqs, max_model_len, block_size, len(model.kv_specs), spec.vocab_size)
        self.kv_cache = KVCacheSize(num_blocks, block_bytes, tuple(model.kv_specs))
        recorded = not config.model.enforce_eager and group.size == 1  # the sum over ranks is not a kernel
        graphs = Graphs(model, backend) if recorded else None
        self.runner = ModelRunner(model, batch, backend, Sampler(model.kernels, config, device), graphs)


def _cell(config: EngineConfig, spec: DecoderSpec) -> torch.dtype | None:
    """What the cache keeps an element in, None for the model's own type."""
    if (name := config.cache.kv_cache_dtype) == "auto":
        return None
    if isinstance(spec.attention, AttentionSpec) and spec.attention.alibi:
        raise ConfigError(
            f"kv_cache_dtype={name!r} cannot be used with {config.model.model}: for its linear biases (ALiBi), keys "
            "hold positions, which one byte cannot tell apart; leave it at auto"
        )
    return CELLS[name]


def _num_blocks(config: EngineConfig, block_bytes: int, useful: int, ranks: int) -> int:
    """How many blocks to keep: as the options say, or as memory allows but no more than all rows could use."""
    cache, free = config.cache, psutil.virtual_memory().available // ranks
    if cache.num_gpu_blocks_override is not None:
        name, count = "num_gpu_blocks_override", cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        name, count = "kv_cache_memory_bytes", cache.kv_cache_memory_bytes // block_bytes
    else:
        return max(1, min(int(free * _FREE_SHARE) // block_bytes, useful))
    if count * block_bytes > free:
        raise ConfigError(
            f"{name} asks for a KV cache of {count * block_bytes / 2**30:.2f} GiB, but only {free / 2**30:.2f} GiB "
            f"of memory are free; lower {name}"
        )
    return max(1, count)  # one is the null block: the scheduler says how many are missing
