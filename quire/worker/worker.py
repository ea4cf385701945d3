"""The worker of one rank: its device, its part of the model, and its KV cache."""

import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from quire.attention.base import ENTRY_ALIGNMENT, AttentionShape, CacheBackend
from quire.attention.by_head import by_head
from quire.attention.cells import CELLS
from quire.attention.chunked import in_chunks
from quire.attention.context import ContextAttention
from quire.attention.cross import across
from quire.attention.selection import choose_backend
from quire.attention.sparse import SparseAttention
from quire.attention.states import StateBackend, matching_block_size
from quire.config.conflicts import check
from quire.config.engine import EngineConfig
from quire.config.features import Place, Setup
from quire.kv.specs import KVCacheSize, StateShape
from quire.layers.lora import AdapterSlots
from quire.messages.changes import Change, Profile
from quire.messages.step import StepCosts
from quire.models.load import load_model
from quire.models.model import Model, Shape
from quire.observability.logging import logger
from quire.ops import Kernels
from quire.ops.memory import keep_what_is_freed
from quire.parallel.mesh import Mesh
from quire.parallel.pipeline import Pipe
from quire.parallel.step_halves import Halves
from quire.platform.limits import free_on_host
from quire.sampling.sampler import Sampler
from quire.worker import memory
from quire.worker.compression import CompressedRows, CompressingForward, CompressingStaging
from quire.worker.context import ContextForward, check_context, choose_context
from quire.worker.device import choose_device
from quire.worker.drafters.drafter import Cached
from quire.worker.expert_balance import expert_balancer
from quire.worker.forward import Forward
from quire.worker.graphs import MOST_DRAFTS, CapturedForward, RecordedForward
from quire.worker.input_batch import InputBatch
from quire.worker.kv_memory import KVMemory
from quire.worker.kv_transfer import Rows
from quire.worker.media import MediaInputs
from quire.worker.model_runner import ModelRunner
from quire.worker.overlap import OverlappedForward
from quire.worker.pooling_runner import PoolingRunner
from quire.worker.resident_memory import ResidentMemory
from quire.worker.runner import Runner
from quire.worker.stage_runner import StageRunner
from quire.worker.staging import Staging
from quire.worker.step_clock import StepClock
from quire.worker.step_costs import step_costs
from quire.worker.tiers import kv_transfers
from quire.worker.warm_up import warm_up

if TYPE_CHECKING:
    from quire.observability.profiling.rank import RankProfiler
    from quire.worker.drafters.load import DrafterParts


class Worker:
    """Loads the model and allocates the cache. Its `runner` then executes the steps."""

    drafter: "DrafterParts | None" = None

    def __init__(  # noqa: C901, PLR0912, PLR0915  # assembles the rank's engine, part by part, in the order of memory
        self, config: EngineConfig, directory: Path, max_model_len: int, mesh: Mesh
    ) -> None:
        """Raises ConfigError if the KV cache does not fit into memory, if the model cannot use its type, or if ranks
        would share a GPU that cannot."""
        self._config = config
        self.device = choose_device(config.kernels.device, mesh)
        group = mesh.tp
        replica = mesh.replica
        device = self.device.torch_device
        started = time.perf_counter()
        pools = config.model.runner == "pooling"
        sharing = mesh.ranks_on_device(device.type)
        shares_gpu = device.type == "cuda" and sharing > 1
        check(Setup(config, place=Place(on_cpu=device.type == "cpu", shares_gpu=shares_gpu)))
        if shares_gpu and mesh.rank == 0:
            logger.warning(
                "%d ranks share a GPU: they exchange tensors through the host, without CUDA graphs; give each its own",
                sharing,
            )
        budget = memory.budget(config, device, sharing)
        if device.type == "cuda":
            budget = replica.minimum(budget)
        with memory.explained("the model's weights", device):
            lora = config.lora
            slots = AdapterSlots(lora.max_loras, lora.max_lora_rank, lora.lora_target_modules)
            adapters = slots if lora.enable_lora else None
            load = partial(load_model, directory, config, max_model_len, device, mesh, mesh.rank == 0)
            model = load(adapters)
        self.resident_memory = ResidentMemory(
            model, config, directory, lambda weights: load(weights=weights), mesh.replica.rank
        )
        backends_of = partial(_backends, config, _block_size(config, model.kernels, mesh, model), model.kernels, mesh)
        with memory.explained("the drafter's weights", device):
            speculation = config.scheduler.speculation
            if speculation is not None and speculation.on_device and model.stage.has_head:
                from quire.worker.drafters.load import DrafterParts

                self.drafter = DrafterParts(speculation, config, directory, model, max_model_len, group, backends_of)
        self.model = model
        dtype = model.kernels.target.dtype
        is_only_rank = mesh.size == 1
        self.backends = backends_of(model)
        max_num_seqs = config.scheduler.max_num_seqs
        block_size = next((backend.tokens_per_block for backend in self.backends), config.cache.block_size)
        chosen = list(dict.fromkeys(self.backends))
        num_parameters = mesh.pp.total(model.num_parameters)
        if mesh.rank == 0:
            seconds = time.perf_counter() - started
            name = f" on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
            ranks = f" on the first of {replica.size} ranks" if replica.size > 1 else ""
            logger.info(
                "Model %s loaded%s in %.1f s: %s parameters, %s, %.2f GiB in memory%s, attention backend %s",
                config.model.model or "quire-demo (bundled)",
                name,
                seconds,
                _count(num_parameters),
                str(dtype).removeprefix("torch."),
                memory.weights_in_memory(model) / 2**30,
                ranks,
                ", ".join(dict.fromkeys(backend.name for backend in chosen)) or "none",
            )
            if speculation is not None and speculation.on_device:
                logger.info(
                    "Drafts are made by %s (%s)", speculation.model or "the model's own head", speculation.method
                )

        if config.model.torch_compile:
            methods = ("store", "prepare", "attend", "select_from", "all_reduce", "reduce_scatter", "all_gather")
            for owner, method in product([*chosen, group.shortcut], methods):
                if hasattr(owner, method):
                    hidden = torch.compiler.disable(getattr(owner, method))  # type: ignore[no-untyped-call]
                    setattr(owner, method, hidden)
            model.forward = torch.compile(model.forward, dynamic=True)  # type: ignore[method-assign]
        with_adapters = model.adapters is not None
        sees, has_sections = model.sees
        batch = InputBatch(
            max_num_seqs, max_model_len, block_size, model.kv_specs, model.num_token_ids, with_adapters, has_sections
        )
        most_tokens = max(max_num_seqs, config.scheduler.tokens_of_a_step(gpu=device.type == "cuda"))
        if pools or not config.scheduler.enable_chunked_prefill:
            most_tokens = max(most_tokens, max_model_len)
        staging = Staging(self.device, batch, model.kernels, most_tokens)
        if (compression := config.cache.compression) is not None:
            rows = CompressedRows(compression, batch, self.device)
            staging = CompressingStaging(self.device, batch, model.kernels, most_tokens, rows)
        pipe = None if mesh.pp.size == 1 else Pipe(mesh.pp, model.residual_stream, model.hidden_size)
        forward = _forward(config, model, self.backends, staging, mesh, pipe)
        self.runner: Runner[Any]
        if not model.stage.has_head:
            processors = None if pools else Sampler(model.kernels, config, device, model.output_rules).processors
            self.runner = StageRunner(model, batch, staging, forward, processors)
        elif model.pooler is not None:
            self.runner = PoolingRunner(model, model.pooler, batch, staging, forward, is_only_rank)
        else:
            self.runner = self._model_runner(config, model, batch, staging, forward, is_only_rank, most_tokens)
        if sees or config.multimodal.enable_prompt_embeds:
            self.runner.media = MediaInputs(model, batch)
        self.runner.in_lockstep = mesh.dp.size > 1
        self.runner.balancer = expert_balancer(model, config.parallel)
        groups = zip(model.kv_specs, self.backends, strict=True)
        pages = [kv_spec.page_bytes(backend.entry_bytes) for kv_spec, backend in groups]
        self._page_bytes = max(pages, default=ENTRY_ALIGNMENT)  # even a model without a cache has a null block
        block_bytes = self._page_bytes + (0 if self.drafter is None else self.drafter.entry_bytes)
        rank_bytes = replica.each(block_bytes)
        useful = max_num_seqs * sum(spec.table_length(max_model_len, block_size) for spec in model.kv_specs) + 1
        if device.type == "cuda":
            self._allocate(1, block_bytes)  # the dummy step needs a null block
            tokens = min(most_tokens, max_num_seqs * max_model_len)
            encoders = config.multimodal.limits(most_tokens, most_tokens)
            free = memory.left_by_a_step(self.runner, budget, tokens, encoders)
            warm_up(self.runner, tokens)
        else:
            together, cached = mesh.ranks_on_machine, model.weight_cache  # replicas map the same files
            free = free_on_host(0 if cached is None else cached.mapped * together)
            free //= together * max(1, len(config.layout.here))
            free -= config.cache.kv_offloading_bytes * block_bytes // sum(rank_bytes)
        num_blocks = replica.minimum(memory.num_blocks(config, free, block_bytes, useful, device))
        self.kv_memory = self._allocate(num_blocks, block_bytes)
        self.resident_memory.know(self.kv_memory, forward)
        if config.cache.kv_cache_pretouch:
            self.kv_memory.blocks.zero_()
        if device.type == "cpu":
            keep_what_is_freed()  # called now, since the memory that loading took has been given back
        if isinstance(forward, CapturedForward):
            forward.capture()
            torch.cuda.empty_cache()  # frees the memory of the eager runs that came before each capture
        if self.drafter is not None:
            chosen += self.drafter.backends
        layout = "; ".join(f"{backend.name}, {dtype}, {backend.layout}" for backend in chosen)
        self.kv_cache = KVCacheSize(num_blocks, rank_bytes, tuple(model.kv_specs), layout, block_size)
        transfer = config.cache.transfer
        clock = self._clock(forward) if transfer is not None and transfer.produces else None
        self.transfers = kv_transfers(config, directory, self.kv_cache, self.kv_memory, self.backends, mesh, clock)
        self._profiler: RankProfiler | None = None
        self._rank = mesh.replica.rank
        if config.profile.enable_layerwise_nvtx_tracing:
            from quire.observability.profiling.ranges import mark_rank

            mark_rank(self.runner, config.model.torch_compile)
        self.step_costs = StepCosts()
        if speculation is not None and speculation.adaptive and not pools:
            self.step_costs = step_costs(self.runner, most_tokens, speculation.num_speculative_tokens, replica)

    def change(self, change: Change) -> None:
        """Raises ValueError or OSError if it cannot be; then nothing has changed."""
        if isinstance(change, Profile):
            from quire.observability.profiling.rank import RankProfiler

            self._profiler = self._profiler or RankProfiler(self.runner, self._rank)
            self._profiler.obey(change)
        else:
            self.runner.was_finite = False  # the weights may be others
            self.resident_memory.change(change)

    def _model_runner(
        self,
        config: EngineConfig,
        model: Model,
        batch: InputBatch,
        staging: Staging,
        forward: Forward,
        is_only_rank: bool,
        most_tokens: int,
    ) -> ModelRunner:
        sampler = Sampler(model.kernels, config, self.device.torch_device, model.output_rules)
        drafter = None
        if self.drafter is not None:
            drafter = self.drafter.drafter(staging, sampler, most_tokens, model.hidden_size)
            forward.taps = dict(drafter.taps)
            is_apart = any(layer + 1 < model.stage.layers.start for layer in drafter.taps)
            check(Setup(config, place=Place(stages_apart=is_apart)))
        runner = ModelRunner(model, batch, staging, forward, sampler, is_only_rank, drafter)
        is_async = config.scheduler.async_scheduling
        is_async = self.device.torch_device.type == "cuda" if is_async is None else is_async
        runner.drafts_stay = is_async and config.parallel.pipeline_parallel_size == 1
        return runner

    def _clock(self, forward: Forward) -> StepClock:
        clock = StepClock(self.model.stage.layers, Rows.of(self.kv_memory.blocks).moment)
        self.runner.clock = clock
        if not self._config.model.torch_compile:
            forward.layer_done = clock.layer_done
        return clock

    def _allocate(self, num_blocks: int, block_bytes: int) -> KVMemory:
        device = self.device.torch_device
        transfer = self._config.cache.transfer
        shared = device.type == "cpu" and transfer is not None and transfer.produces
        kv_memory = KVMemory(num_blocks, block_bytes, device, shared)
        self.model.bind_cache(self.backends, [kv_memory.blocks] * len(self.backends))
        if self.drafter is not None:
            self.drafter.bind_cache(kv_memory.blocks, self._page_bytes)
        return kv_memory


def _forward(
    config: EngineConfig, model: Model, backends: list[CacheBackend], staging: Staging, mesh: Mesh, pipe: Pipe | None
) -> Forward:
    """The forward for the device and the options. It is eager if what the ranks exchange cannot be captured, and for
    models that pool: steps of whole texts are long, and hardly two have the same size."""
    if isinstance(staging, CompressingStaging):
        return CompressingForward(model, backends, staging.rows)
    if mesh.cp.size > 1:
        return ContextForward(model, cast(list[ContextAttention], backends), mesh.cp, pipe)
    if config.model.runner == "pooling":
        return Forward(model, backends, pipe)
    if model.experts is not None and isinstance(model.experts.turns, Halves):
        return OverlappedForward(model, backends, pipe, model.experts.turns, model.experts.group, config.parallel)
    groups = [group for group in (mesh.tp, mesh.dcp) if group.size > 1]
    # Where experts move, graphs would keep to their first places.
    exchanges = model.experts is not None and (model.experts.measures or not model.experts.replicated)
    eager = config.model.enforce_eager or exchanges or not all(group.capturable for group in groups)
    eager |= config.model.model_impl == "transformers"  # whose forward is not made of kernels only
    if not staging.device.is_async:
        kind = Forward if eager or config.model.torch_compile else RecordedForward
        return kind(model, backends, pipe)
    if eager or not all(backend.capturable for backend in backends):
        return Forward(model, backends, pipe)
    most_tokens = config.scheduler.tokens_of_a_step(gpu=True)
    speculation = config.scheduler.speculation
    drafts = min(speculation.num_speculative_tokens, MOST_DRAFTS) if speculation is not None else 0
    return CapturedForward(model, backends, staging, most_tokens, 1 + drafts, mesh.tp.size == 1, pipe, config.kernels)


def _backends(config: EngineConfig, block_size: int, kernels: Kernels, mesh: Mesh, model: Cached) -> list[CacheBackend]:
    """The backend of each KV group. Groups of the same shape share one."""
    target = kernels.target
    speculation = config.scheduler.speculation
    choose = partial(choose_backend, pinned=config.kernels.attention_backend)
    check_context(model.cache_shapes, config.parallel)
    context = choose_context(mesh, model.cache_shapes)
    by_shape: dict[Shape, CacheBackend] = {}
    for cache in model.cache_shapes:
        if isinstance(cache, StateShape):
            drafts = 0 if speculation is None else speculation.num_speculative_tokens
            by_shape[cache] = StateBackend(cache, block_size, drafts, "triton" in kernels.chosen["scan"])
        elif cache not in by_shape:
            shape = AttentionShape(
                cache.num_heads,
                cache.num_kv_heads,
                cache.head_dim,
                block_size,
                target.dtype,
                target.device,
                cache.value_dim,
                _cell(config),
                target.batch_invariant,
            )
            if (indexer := cache.indexer) is not None:
                by_shape[cache] = SparseAttention(shape, indexer.top_k, indexer.head_dim, choose)
                continue
            backend = choose(shape) if context is None else context(shape, mesh.cp, mesh.dcp, choose, kernels)
            if cache.chunk is not None:
                backend = in_chunks(backend, cache.chunk)
            elif cache.crossed:
                backend = across(backend)
            elif config.cache.compression is not None:
                backend = by_head(backend)
            by_shape[cache] = backend
    return [by_shape[cache] for cache in model.cache_shapes]


def _block_size(config: EngineConfig, kernels: Kernels, mesh: Mesh, model: Cached) -> int:
    """The tokens of a block: what the options say, but in a model with states, as many as take the memory of a state,
    on the rank where these are the most."""
    least = config.cache.block_size
    if not any(isinstance(shape, StateShape) for shape in model.cache_shapes):
        return least
    if config.cache.mamba_block_size is not None:
        return config.cache.mamba_block_size
    sizes: dict[bool, int] = {}
    for backend in _backends(config, least, kernels, mesh, model):
        is_state = isinstance(backend, StateBackend)
        sizes[is_state] = max(sizes.get(is_state, 0), backend.entry_bytes())
    return -mesh.replica.minimum(-matching_block_size(least, sizes[True], sizes.get(False, 0) // least))


def _cell(config: EngineConfig) -> torch.dtype | None:
    """The type of an element of the cache. None means the model's own type."""
    return CELLS.get(config.cache.kv_cache_dtype)


def _count(number: int) -> str:
    """135_000_000 -> "135 M"."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
