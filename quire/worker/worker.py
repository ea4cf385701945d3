"""The worker of one rank: its device, its part of the model, and its KV cache."""

import time
from itertools import product
from pathlib import Path

import torch

from quire.attention.base import ENTRY_ALIGNMENT, AttentionBackend, AttentionShape
from quire.attention.cells import CELLS
from quire.attention.selection import choose_backend
from quire.config import ConfigError, EngineConfig
from quire.kvcache.specs import KVCacheSize
from quire.layers.attention_spec import CacheShape
from quire.metrics.logging import logger
from quire.models.load import load_model
from quire.models.model import Model
from quire.ops.memory import keep_what_is_freed
from quire.parallel.mesh import Communicator, Mesh
from quire.sampling.sampler import Sampler
from quire.worker import memory
from quire.worker.device import choose_device
from quire.worker.forward import Forward
from quire.worker.graphs import CapturedForward, RecordedForward
from quire.worker.input_batch import InputBatch
from quire.worker.kv_memory import KVMemory
from quire.worker.model_runner import ModelRunner
from quire.worker.staging import Staging
from quire.worker.step_seconds import step_seconds
from quire.worker.warm_up import warm_up


class Worker:
    """Loads the model and allocates the cache. Its `runner` then executes the steps."""

    def __init__(self, config: EngineConfig, directory: Path, max_model_len: int, mesh: Mesh) -> None:
        """Raises ConfigError if the KV cache does not fit into memory, or if the model cannot use its type."""
        self.device, group = choose_device(config.kernels.device, mesh), mesh.tp
        device, started = self.device.torch_device, time.perf_counter()
        sharing = mesh.ranks_on_device(device.type)
        if device.type == "cuda" and sharing > 1 and mesh.rank == 0:
            logger.warning(
                "%d ranks share a GPU: they exchange tensors through the host, without CUDA graphs; give each its own",
                sharing,
            )
        budget = memory.budget(config, device, sharing)
        if device.type == "cuda":
            budget = group.minimum(budget)
        with memory.explained("the model's weights", device):
            model = load_model(directory, config, max_model_len, device, group, show_progress=mesh.rank == 0)
        self.model, dtype = model, model.kernels.target.dtype
        block_size, max_num_seqs = config.cache.block_size, config.scheduler.max_num_seqs
        self.backends = _backends(config, model)
        chosen = list(dict.fromkeys(self.backends))
        if mesh.rank == 0:
            seconds = time.perf_counter() - started
            name = f" on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
            ranks = f" on each of {group.size} ranks" if group.size > 1 else ""
            logger.info(
                "Model %s loaded%s in %.1f s: %s parameters, %s, %.2f GiB in memory%s, attention backend %s",
                config.model.model or "quire-demo (bundled)", name, seconds, _count(model.num_parameters),
                str(dtype).removeprefix("torch."), memory.weights_in_memory(model) / 2**30, ranks,
                ", ".join(dict.fromkeys(backend.name for backend in chosen)) or "none",
            )  # fmt: skip

        if config.model.torch_compile:
            for backend, method in product(chosen, ("store", "prepare", "attend")):
                if hasattr(backend, method):
                    hidden = torch.compiler.disable(getattr(backend, method))  # type: ignore[no-untyped-call]
                    setattr(backend, method, hidden)
            model.forward = torch.compile(model.forward, dynamic=True)  # type: ignore[method-assign]
        batch = InputBatch(max_num_seqs, max_model_len, block_size, model.kv_specs, model.vocab_size)
        most_tokens = max(max_num_seqs, config.scheduler.tokens_of_a_step(gpu=device.type == "cuda"))
        staging = Staging(self.device, batch, model.kernels, most_tokens)
        forward = _forward(config, model, self.backends, staging, group)
        sampler = Sampler(model.kernels, config, device)
        self.runner = ModelRunner(model, batch, staging, forward, sampler, is_only_rank=group.size == 1)
        groups = zip(model.kv_specs, self.backends, strict=True)
        pages = [kv_spec.page_bytes(backend.entry_bytes()) for kv_spec, backend in groups]
        block_bytes = max(pages, default=ENTRY_ALIGNMENT)  # even a model without a cache has a null block
        useful = max_num_seqs * len(model.kv_specs) * -(-max_model_len // block_size) + 1
        if device.type == "cuda":
            self._allocate(1, block_bytes)  # the dummy step needs a null block
            tokens = min(config.scheduler.tokens_of_a_step(gpu=True), max_num_seqs * max_model_len)
            free = memory.left_by_a_step(self.runner, budget, tokens)
            warm_up(self.runner, tokens)
        else:
            free = memory.free_on_host() // group.size
        num_blocks = group.minimum(memory.num_blocks(config, free, block_bytes, useful, device))
        self.kv_memory = self._allocate(num_blocks, block_bytes)
        if config.cache.kv_cache_pretouch:
            self.kv_memory.blocks.zero_()
        if device.type == "cpu":
            keep_what_is_freed()  # called now, since the memory that loading took has been given back
        if isinstance(forward, CapturedForward):
            forward.capture()
            torch.cuda.empty_cache()  # frees the memory of the eager runs that came before each capture
        layout = "; ".join(f"{backend.name}, {dtype}, {backend.shape.cell or dtype}" for backend in chosen)
        self.kv_cache = KVCacheSize(num_blocks, block_bytes, tuple(model.kv_specs), layout)
        speculation = config.scheduler.speculation
        is_adaptive = speculation is not None and speculation.adaptive
        self.step_seconds = step_seconds(self.runner, most_tokens, group) if is_adaptive else {}

    def _allocate(self, num_blocks: int, block_bytes: int) -> KVMemory:
        kv_memory = KVMemory(num_blocks, block_bytes, self.device.torch_device)
        self.model.bind_cache(self.backends, kv_memory.blocks)
        return kv_memory


def _forward(
    config: EngineConfig, model: Model, backends: list[AttentionBackend], staging: Staging, group: Communicator
) -> Forward:
    """The forward for the device and the options. It is eager if the ranks' all-reduce cannot be captured."""
    eager = config.model.enforce_eager or (group.size > 1 and not group.capturable)
    if not staging.device.is_async:
        return Forward(model, backends) if eager or config.model.torch_compile else RecordedForward(model, backends)
    if eager or not all(backend.capturable for backend in backends):
        return Forward(model, backends)
    most_tokens = config.scheduler.tokens_of_a_step(gpu=True)
    return CapturedForward(model, backends, staging, most_tokens, is_only_rank=group.size == 1)


def _backends(config: EngineConfig, model: Model) -> list[AttentionBackend]:
    """The attention backend of each KV group. Groups of the same shape share a backend."""
    target, block_size = model.kernels.target, config.cache.block_size
    by_shape: dict[CacheShape, AttentionBackend] = {}
    for cache in model.cache_shapes:
        if cache not in by_shape:
            shape = AttentionShape(
                cache.num_heads, cache.num_kv_heads, cache.head_dim, block_size, target.dtype, target.device,
                cache.value_dim, _cell(config, cache), target.batch_invariant,
            )  # fmt: skip
            by_shape[cache] = choose_backend(shape, config.kernels.attention_backend)
    return [by_shape[cache] for cache in model.cache_shapes]


def _cell(config: EngineConfig, shape: CacheShape) -> torch.dtype | None:
    """The type of an element of the cache. None means the model's own type."""
    if (name := config.cache.kv_cache_dtype) not in CELLS:
        return None
    if shape.holds_positions:
        raise ConfigError(
            f"kv_cache_dtype={name!r} cannot be used with {config.model.model}: for its linear biases (ALiBi), keys "
            "hold positions, which one byte cannot tell apart; leave it at auto"
        )
    return CELLS[name]


def _count(number: int) -> str:
    """135_000_000 -> "135 M"."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
