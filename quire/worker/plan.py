"""The plan of one rank, made once from the options, the rank's place in the mesh, and its model's cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quire.attention.base import ENTRY_ALIGNMENT, CacheBackend
from quire.config.engine import EngineConfig
from quire.config.experts import FIXED
from quire.kv.specs import ModelKVSpec, StateShape
from quire.models.kv_groups import KVGroups
from quire.models.model import Shape
from quire.ops import Kernels
from quire.ops.compiler import hidden
from quire.ops.cpu import build
from quire.parallel.mesh import Mesh
from quire.worker.assembly.backends import choose_block_size, make_backends


class ForwardKind(StrEnum):
    """How the layers of a step are called."""

    EAGER = "eager"  # Forward
    RECORDED = "recorded"  # RecordedForward
    CAPTURED = "captured"  # CapturedForward
    OVERLAPPED = "overlapped"  # OverlappedForward
    DIVIDED = "divided"  # ContextForward
    COMPRESSING = "compressing"  # CompressingForward


class RunnerKind(StrEnum):
    """How a step continues after its forward."""

    GENERATE = "generate"  # ModelRunner
    POOL = "pool"  # PoolingRunner
    STAGE = "stage"  # StageRunner


@dataclass(frozen=True)
class CacheGroup:
    """A KV group on this rank. shape: of the rank's cache of one layer."""

    spec: ModelKVSpec
    shape: Shape
    backend: CacheBackend

    @property
    def page_bytes(self) -> int:
        """Bytes of a block that this group uses."""
        return self.spec.page_bytes(self.backend.entry_bytes)

    def as_data(self) -> dict[str, Any]:
        """Return the group in JSON types."""
        spec = self.spec
        return {
            "kind": type(spec).__name__.removesuffix("Spec"),
            "tokens_kept": getattr(spec, "window", None) or getattr(spec, "chunk", None),
            "layers": list(spec.layers),
            "roles": list(dict.fromkeys(entry.role for entry in spec.entries)),
            "heads": self.shape.heads if isinstance(self.shape, StateShape) else self.shape.num_kv_heads,
            "backend": self.backend.name,
            "elements": self.backend.layout,
            "block_bytes": self.page_bytes,
        }


@dataclass(frozen=True)
class RankPlan:
    """The plan of a rank.

    block_size: the tokens that all ranks together store in a block. shape_block_size: see AttentionShape. most_tokens:
    of a step. forward_reason: why this kind of forward was chosen. drafter_forward: how a drafter's layers are called;
    None without a drafter on this rank. drafts_stay: whether drafts stay on the device, see Speculation.
    """

    kernels: Kernels
    groups: tuple[CacheGroup, ...]
    block_size: int
    shape_block_size: int
    most_tokens: int
    runner: RunnerKind
    forward: ForwardKind
    forward_reason: str
    drafter_forward: ForwardKind | None
    drafts_stay: bool

    @property
    def backends(self) -> list[CacheBackend]:
        """The backend of each KV group. Groups of the same shape share one."""
        return [group.backend for group in self.groups]

    @property
    def page_bytes(self) -> int:
        """Bytes of a block, without those of a drafter. Even a model without a cache has a null block."""
        return max((group.page_bytes for group in self.groups), default=ENTRY_ALIGNMENT)

    def as_data(self) -> dict[str, Any]:
        """Return the plan in JSON types."""
        target = self.kernels.target
        return {
            "device": str(target.device),
            "dtype": str(target.dtype).removeprefix("torch."),
            "cpu_isa": _instruction_set() if target.device.type == "cpu" else None,
            "kernels": dict(self.kernels.chosen),
            "runner": str(self.runner),
            "forward": str(self.forward),
            "forward_reason": self.forward_reason,
            "drafter_forward": None if self.drafter_forward is None else str(self.drafter_forward),
            "drafts_stay_on_device": self.drafts_stay,
            "step_tokens": self.most_tokens,
            "block_size": self.block_size,
            "block_bytes": self.page_bytes,
            "kv_groups": [group.as_data() for group in self.groups],
        }


def plan_rank(config: EngineConfig, max_model_len: int, mesh: Mesh, kernels: Kernels, cached: KVGroups) -> RankPlan:
    """Make the plan of a rank. cached: the cache contents of this rank's layers.

    All ranks of a replica call this together. Raises ConfigError or ValueError if the options do not fit the model.
    """
    block_size = choose_block_size(config, kernels, mesh, cached.cache_shapes)
    backends = make_backends(config, block_size, kernels, mesh, cached.cache_shapes)
    if config.model.torch_compile:
        copies = {backend: hidden(backend, "store", "prepare", "attend", "select_from") for backend in backends}
        backends = [copies[backend] for backend in backends]
    gpu = kernels.target.device.type == "cuda"
    forward, reason = choose_forward(config, mesh, gpu, backends)
    speculation = config.scheduler.speculation
    has_head = mesh.pp.rank == mesh.pp.size - 1
    has_drafter = speculation is not None and speculation.on_device and has_head
    is_async = config.scheduler.async_scheduling
    is_async = gpu if is_async is None else is_async
    runner = RunnerKind.POOL if config.model.runner == "pooling" else RunnerKind.GENERATE
    groups = zip(cached.kv_specs, cached.cache_shapes, backends, strict=True)
    return RankPlan(
        kernels,
        tuple(CacheGroup(*group) for group in groups),
        next((backend.tokens_per_block for backend in backends), config.cache.block_size),
        block_size,
        _most_tokens(config, max_model_len, gpu),
        runner if has_head else RunnerKind.STAGE,
        forward,
        reason,
        _drafter_forward(config, gpu) if has_drafter else None,
        has_drafter and is_async and config.parallel.pipeline_parallel_size == 1,
    )


def choose_forward(
    config: EngineConfig, mesh: Mesh, gpu: bool, backends: Sequence[CacheBackend]
) -> tuple[ForwardKind, str]:
    """Return the kind of forward for the device and the options, and the reason.

    It is eager if the ranks' exchanges cannot be captured, and for pooling models: their steps of whole texts are long
    and rarely have the same size.
    """
    options = config.parallel
    shares_experts = options.enable_expert_parallel and mesh.ep.size > 1
    if config.cache.compression is not None:
        return ForwardKind.COMPRESSING, "kv_compression plans attention anew for each layer"
    if mesh.cp.size > 1:
        return ForwardKind.DIVIDED, "prefill_context_parallel_size divides the tokens of a step"
    if config.model.runner == "pooling":
        return ForwardKind.EAGER, "hardly two steps of a model that pools have the same size"
    if shares_experts and options.enable_dbo:
        return ForwardKind.OVERLAPPED, "enable_dbo computes a step in two halves"
    exchanges = shares_experts and mesh.ep.size != mesh.tp.size
    has_capacity = options.exchange(in_graphs=gpu and mesh.ep.capturable) in FIXED
    groups = [group for group in (mesh.tp, mesh.dcp, mesh.ep if exchanges else mesh.tp) if group.size > 1]
    for is_so, reason in (
        (config.model.enforce_eager, "enforce_eager"),
        # Recorded steps would keep using the initial places of experts that move.
        (shares_experts and options.enable_eplb and not gpu, "enable_eplb moves experts"),
        (exchanges and not has_capacity, "ranks exchange the tokens of experts, and the host their numbers"),
        (not all(group.capturable for group in groups), "what ranks exchange cannot be captured"),
        (config.model.model_impl == "transformers", "transformers' code does not consist of kernels only"),
        (config.model.torch_compile and not gpu, "torch_compile calls the layers"),
        (gpu and not all(b.capturable for b in backends), "the attention backend cannot be captured"),
    ):
        if is_so:
            return ForwardKind.EAGER, reason
    if gpu:
        return ForwardKind.CAPTURED, "steps of some sizes are CUDA graphs"
    return ForwardKind.RECORDED, "steps of equally many tokens for each request are recorded"


def _instruction_set() -> str | None:
    """Return the instruction set of the compiled kernels; None if there are none yet."""
    library = build.library()
    return None if library is None else build.instruction_set_of(library)


def _drafter_forward(config: EngineConfig, gpu: bool) -> ForwardKind:
    asked = config.model
    is_eager = gpu or asked.enforce_eager or asked.torch_compile or config.parallel.decode_context_parallel_size > 1
    return ForwardKind.EAGER if is_eager else ForwardKind.RECORDED


def _most_tokens(config: EngineConfig, max_model_len: int, gpu: bool) -> int:
    """Return the largest number of tokens in a step."""
    options = config.scheduler
    most = max(options.max_num_seqs, options.tokens_of_a_step(gpu))
    is_whole = config.model.runner == "pooling" or not options.enable_chunked_prefill
    return max(most, max_model_len) if is_whole else most
