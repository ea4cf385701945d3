"""Which C++ kernels a model needs, and whether an engine may start before they are compiled."""

from collections.abc import Mapping
from typing import Any

from quire.checkpoints.formats.config import quantization_kind
from quire.config.engine import EngineConfig
from quire.layers.attention_spec import AttentionSpec
from quire.layers.specs import MoESpec
from quire.models.spec import DecoderSpec
from quire.ops import Kernels, Target
from quire.ops.cpu import build
from quire.ops.cpu.units import TEAM, TYPES
from quire.parallel.mesh import Mesh

_OF_ALL = {TEAM, "replay", "attention_prepare", "elementwise", "linear", "sampling", "truncate", "masks"}
_OF_QUANTIZED = {"quantized_linear", "quantize", "narrow_codes"}


def choose_kernels(
    config: EngineConfig, spec: DecoderSpec, checkpoint: Mapping[str, Any], is_gguf: bool, target: Target, mesh: Mesh
) -> Kernels:
    """Return the kernels of a model. Missing ones are compiled now, or while the engine runs with PyTorch's operations.

    checkpoint: its config.json. Raises ValueError if the processor lacks the instruction set, or for kernels that are
    pinned and cannot be used.
    """
    build.choose_instruction_set(config.kernels.cpu_isa)
    if target.device.type == "cpu":
        kind = "gguf" if is_gguf else config.model.quantization or quantization_kind(checkpoint)
        build.prepare(needed_units(config, spec, kind, target, mesh), may_start_without(config, spec, mesh))
    return Kernels(target, config.kernels.kernels)


def needed_units(
    config: EngineConfig, spec: DecoderSpec, quantization: str | None, target: Target, mesh: Mesh
) -> set[str]:
    """Return the units whose kernels a model calls. A unit missing here is compiled on the first call of one of its
    kernels.

    quantization: the format of the weights, None for dense ones.
    """
    storage = "_cells" if config.cache.kv_cache_dtype in ("int8", "fp8") else ""
    if target.narrow is not None:
        storage = f"_{TYPES[build.CODES[target.narrow]]}"
    units = _OF_ALL | {f"attention_{TYPES[build.CODES[target.dtype]]}{storage}"}
    if quantization is not None:
        units |= _OF_QUANTIZED
        if "fp8" in quantization or quantization == "compressed-tensors":
            units |= {"float8_linear"}
        if quantization == "gguf":
            units |= {"gguf_blocks"}
    if any(isinstance(mlp, MoESpec) for mlp in spec.mlps):
        units |= {"routing", "grouped_linear"}
    for is_needed, unit in (
        (spec.has_states, "states"),
        (any(map(_changes_heads, spec.mixers)), "heads"),
        (any(getattr(part, "indexer", None) is not None for _, part in spec.cached), "select"),
        (spec.is_encoder or spec.media is not None or spec.crossed > 0, "encoder_attention"),
        (config.lora.enable_lora, "lora"),
        (config.scheduler.speculation is not None, "drafts"),
        (mesh.size > 1, "shared_sums"),
    ):
        if is_needed:
            units.add(unit)
    return units


def _changes_heads(mixer: object) -> bool:
    is_plain = isinstance(mixer, AttentionSpec) and not mixer.alibi and mixer.temperature is None
    return mixer is not None and not is_plain


def may_start_without(config: EngineConfig, spec: DecoderSpec, mesh: Mesh) -> bool:
    """Whether the engine may start with PyTorch's operations, and load the model again for the compiled kernels. If
    other engines, drafters or files read its data, the layout must not change, so such an engine waits.
    """
    kernels = config.kernels
    cache = config.cache
    is_pinned = bool(kernels.kernels) or kernels.attention_backend is not None
    waits = kernels.wait_for_kernels or kernels.batch_invariant or is_pinned or config.model.torch_compile
    has_readers = (
        cache.transfer is not None or cache.has_tiers or cache.events is not None or cache.compression is not None
    )
    adds = config.lora.enable_lora or config.scheduler.speculation is not None or spec.has_states
    is_alone = mesh.size == 1 and mesh.dp.size == 1 and config.model.model_impl != "transformers"
    return is_alone and not (waits or has_readers or adds)
