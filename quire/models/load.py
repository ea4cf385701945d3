"""Builds the model of this rank: spec, layers, weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from quire.checkpoints import merged_adapter
from quire.checkpoints.formats.at_load import quantizer_of
from quire.checkpoints.formats.config import check_format, extra_tensors, quantization_kind, quantization_method
from quire.checkpoints.gguf import read_gguf
from quire.checkpoints.gguf_checkpoint import GgufCheckpoint
from quire.checkpoints.gguf_models import gguf_tensors
from quire.checkpoints.packed.cache import WeightCache, open_cache
from quire.checkpoints.presented import presented
from quire.checkpoints.weights import Checkpoint, load_dummy, load_weights, open_checkpoint, parts_of
from quire.config.engine import ConfigError, EngineConfig
from quire.config.experts import FIXED
from quire.layers.build import Builder
from quire.layers.deep_ep import open_buffer
from quire.layers.deep_ep_low_latency import open_low_latency_buffer
from quire.layers.linear import DenseWeight, LinearMethod
from quire.layers.lora import AdapterSlots
from quire.layers.specs import MoESpec
from quire.layers.symmetric_dispatch import SymmetricBuffer
from quire.models.decoder import Decoder
from quire.models.description import ModelDescription, describe
from quire.models.kernel_units import choose_kernels
from quire.models.model import LoadedModel, MediaEncoder
from quire.models.pooler import Pooler, make_poolers
from quire.models.precision import resolve_dtype, target_of
from quire.models.spec import DecoderSpec
from quire.models.stages import choose_stage
from quire.multimodal.spec import MediaSpec
from quire.ops import Kernels, Target
from quire.ops.cpu.build import find_compiler, is_deferred
from quire.ops.memory import lasting
from quire.parallel.experts import ExpertRanks, StepCapacity
from quire.parallel.mesh import Mesh
from quire.parallel.pipeline import Stage
from quire.parallel.residual_stream import DividedStream, ResidualStream
from quire.parallel.step_halves import Halves, WholeStep


def _expert_ranks(config: EngineConfig, spec: DecoderSpec, mesh: Mesh, device: torch.device) -> ExpertRanks | None:
    """Return the ranks across which the experts of each layer are distributed. Raises ConfigError if their kernels
    cannot be used."""
    options = config.parallel
    if not options.enable_expert_parallel:
        return None
    replicated = mesh.ep.size == mesh.tp.size
    if mesh.ep.size == 1:
        return None
    group = mesh.tp if replicated else mesh.ep
    ranks = ExpertRanks(
        group,
        replicated,
        options.balance.num_redundant_experts if options.enable_eplb else 0,
        options.enable_eplb,
        Halves() if options.enable_dbo else WholeStep(),
    )
    return ranks if replicated else _with_exchange(ranks, config, spec, mesh, device)


def _with_exchange(
    ranks: ExpertRanks, config: EngineConfig, spec: DecoderSpec, mesh: Mesh, device: torch.device
) -> ExpertRanks:
    """Return the ranks with the memory and the capacity of their exchange. Raises ConfigError."""
    backend = config.parallel.exchange(in_graphs=device.type == "cuda" and ranks.group.capturable)
    dtype = resolve_dtype(config.model)
    group = ranks.group
    buffer = None
    capacity = StepCapacity(group) if backend in FIXED else None
    if capacity is not None and backend != "allgather_reducescatter":
        mixtures = [mlp for mlp in spec.mlps if isinstance(mlp, MoESpec)]
        slots = max(len(ranks.first_slots(mixture.num_experts)) for mixture in mixtures)
        room = -(-capacity.most // mesh.tp.size)
        if backend == "deepep_low_latency":
            buffer = open_low_latency_buffer(group, spec.hidden_size, slots, room)
        else:
            top_k = max(mixture.top_k for mixture in mixtures)
            buffer = SymmetricBuffer(group, dtype, device, spec.hidden_size, slots, top_k, room)
    elif backend == "deepep_high_throughput":
        buffer = open_buffer(group, dtype, device, spec.hidden_size)
    return replace(ranks, backend=backend, buffer=buffer, capacity=capacity)


@dataclass(frozen=True)
class _Wanted:
    """The arguments of `load_model`, with the description of the checkpoint and the target of its kernels."""

    directory: Path
    config: EngineConfig
    max_model_len: int
    mesh: Mesh
    show_progress: bool
    adapters: AdapterSlots | None
    weights: Path | Checkpoint | None
    description: ModelDescription
    target: Target

    @property
    def is_random(self) -> bool:
        return self.config.model.load_format == "dummy" and self.weights is None

    @property
    def source(self) -> Path | None:
        """The folder of the weights that transformers loads, None for random weights. Raises ValueError."""
        if isinstance(self.weights, Checkpoint):
            raise ValueError("transformers' code takes new weights from a folder only")
        return None if self.is_random else self.weights or self.directory


def load_model(
    directory: Path,
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
    mesh: Mesh,
    show_progress: bool,
    adapters: AdapterSlots | None = None,
    weights: Path | Checkpoint | None = None,
) -> LoadedModel:
    """Build this rank's part of the model of a checkpoint's directory or GGUF file, with its encoder and pooler, and
    fill the parameters.

    adapters: see Builder. weights: replacement tensors, or their folder.
    """
    lasting.seal()  # memory of earlier loads can be released as a whole, and so can this model's
    description = describe(directory, config.model)
    check_format(config.model.quantization, description.config, directory.is_file())
    target = target_of(config, directory, device)
    load = _load_transformers if config.model.model_impl == "transformers" else _load_decoder
    wanted = _Wanted(directory, config, max_model_len, mesh, show_progress, adapters, weights, description, target)
    return load(wanted)


def _load_transformers(wanted: _Wanted) -> LoadedModel:
    config = wanted.config
    description = wanted.description
    target = wanted.target
    kernels = choose_kernels(config, description.spec, description.config, False, target, wanted.mesh)
    from quire.models.transformers_backend.load import load_model as load  # imports transformers

    source = wanted.source
    model = load(description, config, wanted.max_model_len, kernels, wanted.mesh, source, wanted.adapters)
    poolers: Mapping[str, Pooler] = {}
    if description.pooling is not None and model.stage.has_head:
        builder = Builder(kernels, wanted.mesh.tp, lambda name: DenseWeight)
        poolers = make_poolers(builder, description.pooling.heads, source)
        if source is None:
            load_dummy(builder, wanted.show_progress)
        else:
            load_weights(open_checkpoint(source), builder, (r"",), show_progress=False)  # transformers loads the others
    return LoadedModel(model, poolers=poolers)


def _load_decoder(wanted: _Wanted) -> LoadedModel:
    config = wanted.config
    description = wanted.description
    mesh = wanted.mesh
    stored = _open(wanted)
    checkpoint = stored.checkpoint
    spec = description.spec
    if spec.tie_embeddings is None and checkpoint is not None:
        spec = replace(spec, tie_embeddings=not checkpoint.has(f"{spec.names['lm_head']}.weight"))
    is_gguf = wanted.directory.is_file()
    kernels = choose_kernels(config, spec, description.config, is_gguf, wanted.target, mesh)
    builder = _builder(wanted, spec, stored, kernels)
    stage = None
    elsewhere = set[str]()
    if mesh.pp.size > 1:
        drafts = config.scheduler.speculation is not None and config.scheduler.speculation.on_device
        stage, elsewhere = choose_stage(builder, spec, config.parallel, mesh.pp.rank, drafts)
    model = Decoder(builder, spec, wanted.max_model_len, stage)
    encoder = MediaEncoder()
    if spec.media is not None:
        encoder = _encoder(model.stage, builder, spec.media, wanted)
    elsewhere |= builder.tensors_elsewhere
    if wanted.adapters is not None:
        wanted.adapters.note_elsewhere(elsewhere)
    poolers: Mapping[str, Pooler] = {}
    if description.pooling is not None and model.stage.has_head:
        folder = wanted.weights if isinstance(wanted.weights, Path) else wanted.directory
        poolers = make_poolers(builder, description.pooling.heads, None if checkpoint is None else folder)
    if checkpoint is None:
        load_dummy(builder, wanted.show_progress)
        return LoadedModel(model, encoder, poolers)
    parts = parts_of(checkpoint, builder)
    weight_cache = _fill(wanted, spec, builder, checkpoint, elsewhere)
    return LoadedModel(model, encoder, poolers, parts, weight_cache)


def ignored_tensors(spec: DecoderSpec, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return patterns for the names of a checkpoint's tensors that are not parameters. fields: of its config.json."""
    tied = (rf"{spec.names['lm_head']}\.weight$",) if spec.tie_embeddings else ()
    return (*spec.ignored, *extra_tensors(fields), *tied)


def _fill(
    wanted: _Wanted, spec: DecoderSpec, builder: Builder, checkpoint: Checkpoint, elsewhere: set[str]
) -> WeightCache | None:
    """Fill a model's parameters from the checkpoint, or from the packed weights that an earlier start has cached.

    elsewhere: the tensors that only other ranks need. Returns the cache, None if the weights are not cached.
    """
    ignored = ignored_tensors(spec, wanted.description.config)
    cache = None
    if wanted.weights is None and not is_deferred():  # new weights are used once, and deferred kernels reload them soon
        cache = open_cache(wanted.config, wanted.directory, builder)
    is_restored = cache is not None and cache.restore()
    load_weights(checkpoint, builder, ignored, wanted.show_progress, elsewhere, is_restored)
    if cache is not None and not is_restored:
        cache.keep()
    return cache


@dataclass(frozen=True)
class _Stored:
    """The weights as stored. checkpoint: None for random weights. method_of, shape_of: see Builder."""

    checkpoint: Checkpoint | None
    method_of: Callable[[str], LinearMethod]
    shape_of: Callable[[str], tuple[int, ...] | None]


def _open(wanted: _Wanted) -> _Stored:
    """Open a GGUF file, random weights, or a checkpoint in any other format."""
    fields = wanted.description.config
    if wanted.directory.is_file():
        gguf = GgufCheckpoint(gguf_tensors(read_gguf(wanted.directory)))
        return _Stored(gguf, gguf.linear_method(), gguf.shape_of)
    if wanted.is_random:
        is_dense = quantization_kind(fields) is None
        shape = () if is_dense else None  # each quantized expert has its own tensors
        return _Stored(None, quantization_method(fields), lambda name: shape)
    weights = wanted.weights
    files = weights if isinstance(weights, Checkpoint) else open_checkpoint(weights or wanted.directory)
    checkpoint = presented(files, fields)
    if "JinaEmbeddingsV5Model" in (fields.get("architectures") or ()):
        checkpoint = merged_adapter.with_adapter(checkpoint, wanted.directory, fields)
    method_of = checkpoint.linear_method() or quantization_method(fields, checkpoint.has)
    return _Stored(checkpoint, method_of, files.shape_of)


def _builder(wanted: _Wanted, spec: DecoderSpec, stored: _Stored, kernels: Kernels) -> Builder:
    """Raises ConfigError if the options do not fit the model or this machine."""
    config = wanted.config
    mesh = wanted.mesh
    target = wanted.target
    adapters = wanted.adapters
    if config.model.torch_compile:
        if target.device.type == "cpu" and find_compiler() is None:
            raise ConfigError("torch_compile needs a C++ compiler; install g++, or leave torch_compile out")
        kernels.hide_from_compiler()
    experts = _expert_ranks(config, spec, mesh, target.device)
    stream = (DividedStream if config.parallel.enable_sequence_parallel else ResidualStream)(mesh.tp)
    option = config.model.quantization
    if option == "fp8" and quantization_kind(wanted.description.config) is not None:
        option = None  # the option names the checkpoint's format, whose dense layers remain dense
    quantizer = quantizer_of(option, spec.names)
    return Builder(kernels, mesh.tp, stored.method_of, quantizer, adapters, experts, stream, stored.shape_of)


def _encoder(stage: Stage, builder: Builder, media: MediaSpec, wanted: _Wanted) -> MediaEncoder:
    """Build the image or audio encoder. Its parameters are on the first stage of a pipeline."""
    directory = wanted.directory
    config = wanted.config
    towers = import_module(f"quire.models.towers.{media.family}")
    largest = None
    if builder.device.type == "cuda":
        from quire.multimodal.samples import largest_items

        largest = partial(largest_items, media, directory, config.multimodal)
    rules = partial(towers.output_rules, directory, media) if hasattr(towers, "output_rules") else None
    if hasattr(towers, "load"):  # an encoder of transformers, which reads its weights itself
        if stage.layers.start > 0 or config.multimodal.language_model_only:
            return MediaEncoder()
        return MediaEncoder(towers.load(builder, media, wanted.source, config.multimodal), media.levels, largest)
    builder = builder if stage.layers.start == 0 else builder.elsewhere
    first = len(builder.slots)
    tower = towers.make(builder, media)
    builder.slots[first:] = [replace(slot, name=media.name_of(slot.name)) for slot in builder.slots[first:]]
    return MediaEncoder(tower, media.levels, largest, rules)
