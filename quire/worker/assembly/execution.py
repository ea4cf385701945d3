"""Creates the forward and the runner of a rank from its plan."""

from functools import partial
from typing import Any, cast

import torch

from quire.attention.base import CacheBackend
from quire.attention.by_head import AttentionByHead
from quire.attention.context import ContextAttention
from quire.config.conflicts import check
from quire.config.engine import EngineConfig
from quire.config.features import Place, Setup
from quire.models.model import Model
from quire.parallel.mesh import Mesh
from quire.parallel.pipeline import Pipe
from quire.parallel.step_halves import Halves
from quire.sampling.sampler import Sampler
from quire.worker.assembly.loading import LoadedRank
from quire.worker.compression import CompressedRows, CompressingForward, CompressingStaging
from quire.worker.context import ContextForward
from quire.worker.device import Device
from quire.worker.drafters.drafter import Drafter
from quire.worker.expert_balance import expert_balancer
from quire.worker.forward import Forward, ForwardParts
from quire.worker.graphs import MOST_DRAFTS, CapturedForward, RecordedForward
from quire.worker.input_batch import InputBatch
from quire.worker.kv_transfer import moment
from quire.worker.media import MediaInputs, NoMedia
from quire.worker.model_runner import ModelRunner
from quire.worker.overlap import OverlappedForward
from quire.worker.plan import ForwardKind, RankPlan, RunnerKind
from quire.worker.pooling_runner import PoolingRunner
from quire.worker.runner import Runner, RunnerParts
from quire.worker.stage_runner import StageRunner
from quire.worker.staging import Staging
from quire.worker.step_clock import NoClock, StepClock


def make_runner(
    config: EngineConfig, max_model_len: int, device: Device, mesh: Mesh, loaded: LoadedRank
) -> Runner[Any]:
    """Raises ConfigError if the drafter does not fit."""
    plan = loaded.plan
    model = loaded.model
    encoder = loaded.target.encoder
    sees, has_sections = model.sees
    batch = InputBatch(
        config.scheduler.max_num_seqs,
        max_model_len,
        plan.block_size,
        model.kv_specs,
        model.num_token_ids,
        model.adapters is not None,
        has_sections,
    )
    staging = _staging(config, device, batch, loaded)
    sampler = None
    if config.model.runner != "pooling":
        sampler = Sampler(model.kernels, config, device.torch_device, encoder.output_rules)
    drafter = None if sampler is None else _drafter(config, loaded, staging, sampler)
    transfer = config.cache.transfer
    clock = None
    if transfer is not None and transfer.produces:
        clock = StepClock(model.stage.layers, partial(moment, device.torch_device))
    parts = RunnerParts(
        model,
        batch,
        staging,
        _forward(config, mesh, plan, model, staging, drafter, clock),
        media=MediaInputs(model, encoder, batch) if sees or config.multimodal.enable_prompt_embeds else NoMedia(),
        balancer=expert_balancer(model, config.parallel),
        clock=clock or NoClock(),
        is_only_rank=mesh.size == 1,
        in_lockstep=mesh.dp.size > 1,
    )
    if plan.runner is RunnerKind.STAGE:
        return StageRunner(parts, None if sampler is None else sampler.processors)
    if plan.runner is RunnerKind.POOL:
        return PoolingRunner(parts, loaded.target.poolers)
    assert sampler is not None
    return ModelRunner(parts, sampler, drafter, plan.drafts_stay)


def _staging(config: EngineConfig, device: Device, batch: InputBatch, loaded: LoadedRank) -> Staging:
    kernels = loaded.model.kernels
    most_tokens = loaded.plan.most_tokens
    if (compression := config.cache.compression) is not None:
        group = loaded.plan.groups[0]
        backend = cast(AttentionByHead, group.backend)
        make_rows = partial(CompressedRows, compression, batch, device, backend, len(group.spec.entries))
        return CompressingStaging(device, batch, kernels, most_tokens, make_rows)
    count_kept = None if loaded.drafter is None else loaded.drafter.count_kept(device, batch)
    return Staging(device, batch, kernels, most_tokens, count_kept)


def _drafter(config: EngineConfig, loaded: LoadedRank, staging: Staging, sampler: Sampler) -> Drafter | None:
    """Raises ConfigError for a drafter that reads layers this rank does not have."""
    if loaded.drafter is None:
        return None
    drafter = loaded.drafter.drafter(staging, sampler, loaded.plan)
    is_apart = any(layer + 1 < loaded.model.stage.layers.start for layer in drafter.taps)
    check(Setup(config, place=Place(stages_apart=is_apart)))
    return drafter


def _forward(
    config: EngineConfig,
    mesh: Mesh,
    plan: RankPlan,
    model: Model,
    staging: Staging,
    drafter: Drafter | None,
    clock: StepClock | None,
) -> Forward:
    compiles = config.model.torch_compile
    parts = ForwardParts(
        pipe=None if mesh.pp.size == 1 else Pipe(mesh.pp, model.residual_stream, model.input_size),
        taps={} if drafter is None else drafter.taps,
        layer_done=None if clock is None or compiles else clock.layer_done,
        compiled=torch.compile(model.forward, dynamic=True) if compiles else None,
        capacity=None if model.experts is None or mesh.cp.size > 1 else model.experts.capacity,
    )
    backends = plan.backends
    match plan.forward:
        case ForwardKind.COMPRESSING:
            assert isinstance(staging, CompressingStaging)
            return CompressingForward(model, backends, staging.rows, parts)
        case ForwardKind.DIVIDED:
            return ContextForward(model, cast(list[ContextAttention], backends), mesh.cp, parts)
        case ForwardKind.OVERLAPPED:
            assert model.experts is not None
            assert isinstance(model.experts.turns, Halves)
            return OverlappedForward(model, backends, parts, model.experts.turns, model.experts.group, config.parallel)
        case ForwardKind.RECORDED:
            return RecordedForward(model, backends, parts)
        case ForwardKind.CAPTURED:
            return _captured(config, mesh, model, backends, staging, parts)
        case ForwardKind.EAGER:
            return Forward(model, backends, parts)


def _captured(
    config: EngineConfig, mesh: Mesh, model: Model, backends: list[CacheBackend], staging: Staging, parts: ForwardParts
) -> CapturedForward:
    batch = staging.batch
    most_tokens = min(config.scheduler.tokens_of_a_step(gpu=True), len(batch.num_tokens) * batch.max_model_len)
    speculation = config.scheduler.speculation
    drafts = min(speculation.num_speculative_tokens, MOST_DRAFTS) if speculation is not None else 0
    return CapturedForward(model, backends, staging, most_tokens, 1 + drafts, mesh.ep.size == 1, parts, config.kernels)
