"""Assembles an engine: makes a plan of its parts, and builds a core from the plan."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quire.checkpoints.formats.config import check_format
from quire.config.conflicts import check
from quire.config.engine import EngineConfig
from quire.config.features import Setup
from quire.engine.adjustments import adjustments_of
from quire.engine.core import EngineCore
from quire.engine.fingerprint import cache_fingerprint
from quire.engine.machine import Machine
from quire.engine.plan import EnginePlan
from quire.engine.tiers import make_tiers
from quire.executor.base import Executor
from quire.executor.choice import make_executor, uses_gpu
from quire.executor.threads import choose_threads, use_threads
from quire.kv.hashing import hash_root
from quire.kv.manager import KVCacheManager
from quire.kv.specs import KVCacheSize
from quire.lora.gate import AdapterGate
from quire.messages.engine import RendezvousPlace
from quire.models.description import describe
from quire.models.kernel_units import choose_kernels
from quire.models.kv_groups import kv_groups
from quire.models.precision import target_of, type_name
from quire.models.spec import DecoderSpec
from quire.observability.logging import logger
from quire.parallel.mesh import Communicator
from quire.parallel.planning import planned_mesh
from quire.parallel.sizes import MeshSizes
from quire.scheduler.compression import Compression
from quire.scheduler.encoding import EncoderCache
from quire.scheduler.gate import Connector
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.pace import Pace
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import Speculation
from quire.speculation.choice import make_proposer
from quire.speculation.lengths import DraftLengths
from quire.structured.backends import check_backend, load_backend
from quire.structured.gate import GrammarGate, Loaded
from quire.worker.context import check_context
from quire.worker.machine_defaults import Estimate
from quire.worker.plan import RankPlan, plan_rank

if TYPE_CHECKING:
    from quire.engine.kv_events import KVEvents


def scheduler_limits(config: EngineConfig, max_model_len: int, estimate: Estimate | None = None) -> SchedulerLimits:
    """Return the scheduler's limits for the options. estimate: estimated step times, if known.

    Raises ConfigError for a device that does not exist.
    """
    options = config.scheduler
    gpu = uses_gpu(config)
    is_async = gpu if options.async_scheduling is None else options.async_scheduling
    if options.speculation and not options.speculation.on_device and is_async:
        is_async = False
    stages = config.parallel.pipeline_parallel_size
    # On a CPU, the time of a step follows from its tokens, so one more step fills gaps at no cost. On a GPU, each step
    # reads all weights, so more steps with fewer requests each would take longer.
    depth = 1 + is_async if stages == 1 else stages + (not gpu)
    tokens = options.tokens_of_a_step(gpu)
    pools = config.model.runner == "pooling"
    is_whole = pools or not options.enable_chunked_prefill
    pace = None
    if options.max_itl is not None and not pools:
        seconds = options.max_itl / 1000
        pace = Pace(seconds) if estimate is None else Pace(seconds, estimate.tokens_within(seconds))
    return SchedulerLimits(
        options.max_num_active_seqs or options.max_num_seqs,
        max(tokens, max_model_len) if is_whole else tokens,
        max_model_len,
        options.scheduling_policy,
        depth,
        0 if pools else options.long_prefill_token_threshold,
        options.speculation.num_speculative_tokens if options.speculation and options.speculation.on_device else 0,
        is_whole,
        stages,
        pace,
        options.long_prefill_token_threshold_adaptive,
    )


def _fitting(limits: SchedulerLimits, kv: KVCacheSize) -> SchedulerLimits:
    """Return the limits with max_model_len reduced, if necessary, so that one request of that length fits into the KV
    cache."""
    chunk = limits.most_in_flight

    def blocks(num_tokens: int) -> int:
        return sum(spec.max_blocks(num_tokens, chunk, kv.block_size) for spec in kv.specs)

    longest = bisect_right(range(limits.max_model_len + 1), kv.num_blocks - 1, key=blocks) - 1
    if longest < limits.max_model_len:
        logger.info("max_model_len is %d: the model's %d tokens do not fit memory", longest, limits.max_model_len)
    return replace(limits, max_model_len=max(longest, 1))


def _encoders(config: EngineConfig, spec: DecoderSpec, limits: SchedulerLimits) -> EncoderCache | None:
    """Return the encoder cache of an engine that accepts images, audio or embeddings, otherwise None."""
    if spec.media is None and not config.multimodal.enable_prompt_embeds:
        return None
    return EncoderCache(config.multimodal.limits(limits.max_num_batched_tokens, limits.longest_chunk))


_PATIENCE = 3600.0  # seconds to wait for a grammar and those queued before it, in an engine with one user


def plan_engine(
    config: EngineConfig, directory: Path, max_model_len: int, *, shares_experts: bool = False
) -> EnginePlan:
    """Plan the parts of an engine with these options. Nothing is loaded or started.

    shares_experts: whether the engine shares experts with other replicas, whose steps must have the same size. Raises
    ConfigError or ValueError for options that do not fit the model or the machine.
    """
    given = config
    description = describe(directory, config.model)
    check(Setup(config, model=description.facts))
    spec = description.spec
    machine = Machine(config, description, directory, shares_experts=shares_experts)
    config = machine.with_tokens_of_a_step()
    limits = scheduler_limits(config, max_model_len, machine.estimate)
    limits.validate()
    check_backend(config.sampling.structured_outputs_config)
    compression = _compression(config, limits)
    group = Communicator(0, config.parallel.tensor_parallel_size)
    check_context([] if spec.is_encoder else [part.cache_shape(group) for _, part in spec.cached], config.parallel)
    threads = choose_threads(len(config.layout.here), config.kernels.threads, machine.threads)
    target = target_of(config, directory, torch.device("cpu" if machine.is_cpu else "cuda"))
    adjustments = tuple(adjustments_of(given, description, limits, machine, target, threads))
    return EnginePlan(config, directory, description, limits, compression, machine, threads, adjustments)


def plan_first_rank(plan: EnginePlan) -> RankPlan:
    """Plan what the first rank of the engine will execute, without its weights. The ranks themselves also call
    `plan_rank`; pipeline ranks have some of the layers. Missing kernels are compiled, as at a start.

    Raises ConfigError or ValueError for options that do not fit the model or the machine.
    """
    config = plan.config
    description = plan.description
    is_gguf = plan.directory.is_file()
    check_format(config.model.quantization, description.config, is_gguf)
    kind = "cuda" if uses_gpu(config) else "cpu"
    is_near = config.layout.machines == 1 and config.cluster.distributed_executor_backend != "ray"
    mesh = planned_mesh(MeshSizes.of(config.parallel), kind, can_share_memory=is_near)
    target = target_of(config, plan.directory, mesh.device(kind))
    kernels = choose_kernels(config, description.spec, description.config, is_gguf, target, mesh)
    groups = kv_groups(description.spec, plan.limits.max_model_len, mesh.tp)
    return plan_rank(config, plan.limits.max_model_len, mesh, kernels, groups)


def explain(config: EngineConfig) -> dict[str, Any]:
    """Describe an engine with these options in JSON types. No weights are downloaded or loaded.

    Raises ConfigError, ValueError or ModelNotFoundError.
    """
    from quire.models.heads.resolve import with_files  # a core receives the file paths from its clients

    config, directory = with_files(config, weights=False)
    max_model_len = describe(directory, config.model).max_model_len
    plan = plan_engine(config, directory, max_model_len, shares_experts=config.parallel.shares_experts)
    return plan.as_data(plan_first_rank(plan))


def dtype_name(config: EngineConfig, directory: Path) -> str:
    """Return the name of the type of the tensors between a model's products. Raises WeightError."""
    device = torch.device("cuda" if uses_gpu(config) else "cpu")
    return type_name(target_of(config, directory, device).dtype)


def make_core(
    config: EngineConfig,
    directory: Path,
    max_model_len: int,
    place: RendezvousPlace | None = None,
    rank: int = 0,
    *,
    has_one_user: bool = False,
    journal: Path | None = None,
    report_silence: Callable[[float], None] = lambda seconds: None,
) -> EngineCore:
    """Start the executor and create a scheduler for its KV cache. Raises ConfigError or ValueError.

    place: the rendezvous of replicas that share experts, None if this one shares none. rank: the core's number.
    has_one_user: whether a single user waits for all requests and may submit thousands of grammars at once. journal,
    report_silence: see EngineCore.
    """
    replica = rank - config.layout.here.start
    plan = plan_engine(config.at_replica(replica), directory, max_model_len, shares_experts=place is not None)
    config = plan.config
    use_threads(plan.threads)
    plan.log()
    executor = make_executor(config, directory, max_model_len, place)
    kv = executor.kv_cache
    fingerprint = partial(cache_fingerprint, config, directory, kv.layout)
    try:
        scheduler = _scheduler(plan, executor, fingerprint(), replica, has_one_user)
        kv_events = _kv_events(config, kv, rank)
    except ValueError:
        executor.shutdown()
        raise
    lockstep = None
    if place is not None:
        from quire.engine.lockstep import Waves  # a single replica does not need zmq

        lockstep = Waves(place, config.parallel.data_parallel_size)
    measurement = plan.machine.measurement if rank == config.layout.here[0] else None  # only one replica measures
    share = config.cache.pinned_prefix_share
    core = EngineCore(
        scheduler, executor, lockstep, kv_events, fingerprint, share, measurement, journal, report_silence
    )
    if kv.specs:
        _log_kv_cache(kv, scheduler)
    return core


def _scheduler(plan: EnginePlan, executor: Executor, fingerprint: str, replica: int, has_one_user: bool) -> Scheduler:
    """Create the scheduler for an executor's KV cache. fingerprint: of its blocks. replica: the number of this one on
    its machine. Raises ConfigError or ValueError."""
    config = plan.config
    spec = plan.description.spec
    kv = executor.kv_cache
    limits = plan.limits if config.model.max_model_len != -1 else _fitting(plan.limits, kv)
    adapters = None
    if config.lora.enable_lora:
        adapters = AdapterGate(executor, config.lora.max_loras, config.lora.num_in_memory)
    tiers = make_tiers(config, kv, hash_root(fingerprint))
    scheduler = Scheduler(
        limits,
        kv.num_blocks,
        list(kv.specs),
        kv.block_size,
        config.cache.enable_prefix_caching and bool(kv.specs),
        fingerprint,
        grammars=GrammarGate(partial(_load_grammars, config, plan.directory, spec, has_one_user)),
        vocab_size=spec.vocab_size,
        speculation=_speculation(config, limits, executor),
        adapters=adapters,
        tiers=tiers,
        mover=executor,
        compression=plan.compression,
        encoders=_encoders(config, spec, limits),
        connect_engines=_connect_engines(plan, executor, len(tiers), replica),
    )
    if config.profile.enable_layerwise_nvtx_tracing:
        from quire.observability.profiling.ranges import mark_core

        mark_core(scheduler)
    return scheduler


def _connect_engines(
    plan: EnginePlan, executor: Executor, tier: int, replica: int
) -> Callable[[KVCacheManager], Connector] | None:
    """Return the function that creates the connector to other engines, None if there is none. tier: its number."""
    transfer = plan.config.cache.transfer
    if transfer is None or not executor.kv_cache.specs:
        return None
    plugin = import_module(f"{transfer.kv_connector_module_path}.exchange")
    make = partial(plugin.make_connector, plan.config, plan.directory, executor.kv_cache)
    return partial(make, mover=executor, tier=tier, replica=replica)


def _compression(config: EngineConfig, limits: SchedulerLimits) -> Compression | None:
    """Raises ConfigError if the limits do not allow the configured compression."""
    options = config.cache.compression
    if options is None:
        return None
    compression = Compression(options, config.cache.block_size)
    compression.check(limits)
    return compression


def _speculation(config: EngineConfig, limits: SchedulerLimits, executor: Executor) -> Speculation | None:
    """Raises ConfigError if the proposer cannot be created."""
    options = config.scheduler.speculation
    if options is None:
        return None
    proposer = None if options.on_device else make_proposer(options)
    lengths = DraftLengths(options.num_speculative_tokens, executor.step_costs)
    stay = limits.depth > 1 and limits.stages == 1
    longest = options.max_model_len or limits.max_model_len
    return Speculation(proposer, lengths, stay, longest)


def _load_grammars(config: EngineConfig, directory: Path, spec: DecoderSpec, has_one_user: bool) -> Loaded:
    # The text side is imported only when needed, so that a core in its own process is ready earlier.
    from quire.checkpoints.hub import tokenizer_directory
    from quire.checkpoints.metadata import load_tokenizer
    from quire.engine.frontend import generation_config
    from quire.engine.processor import end_of_sequence
    from quire.platform.untrusted.pool import shared_pool
    from quire.structured.vocabulary import Vocabulary
    from quire.structured.workers import GrammarCompiler

    options = config.model
    tokenizer = load_tokenizer(tokenizer_directory(options, directory))
    eos_token_ids = end_of_sequence(tokenizer, generation_config(options, directory))
    vocabulary = Vocabulary(tokenizer, spec.vocab_size, eos_token_ids)
    libraries = config.sampling.structured_outputs_config
    compiler = GrammarCompiler(libraries, vocabulary, shared_pool(), _PATIENCE if has_one_user else None)
    return Loaded(load_backend(libraries, vocabulary), compiler, eos_token_ids)


def _log_kv_cache(kv: KVCacheSize, scheduler: Scheduler) -> None:
    max_model_len = scheduler.limits.max_model_len
    room = scheduler.kv.room(max_model_len)
    logger.info(
        "KV cache: %.2f GiB, %s blocks of %d tokens, room for %s tokens: %.1f requests of the full %s tokens "
        "(%.0f %% of that memory is needed)",
        kv.num_blocks * max(kv.rank_bytes) / 2**30,
        f"{kv.num_blocks:,}",
        kv.block_size,
        f"{int(room * max_model_len):,}",
        room,
        f"{max_model_len:,}",
        100 * scheduler.kv.kept_share(max_model_len),
    )


def _kv_events(config: EngineConfig, kv: KVCacheSize, rank: int) -> "KVEvents | None":
    """Return the publisher of the core's prefix-cache events, None if the options disable it. Raises ConfigError."""
    options = config.cache.events
    if options is None:
        return None
    from quire.engine.kv_events import KVEventPublisher, KVEvents

    publisher = KVEventPublisher(options, rank)
    return KVEvents(kv.specs, kv.block_size, publisher.send, publisher.close)
