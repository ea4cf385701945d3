"""Translates the fields of vLLM's compilation_config to options of Quire."""

import logging
from collections.abc import Mapping
from typing import Any

from quire.config.declaration import ConfigError, read_json

_logger = logging.getLogger("quire")

# Modes by vLLM's numbers and names. Mode 3, vLLM's default, fuses operations with vLLM's own compiler; Quire has fused
# kernels instead.
_MODES = {
    **dict.fromkeys((0, "0", "NONE"), False),
    **dict.fromkeys((1, "1", "STOCK_TORCH_COMPILE", 2, "2", "DYNAMO_TRACE_ONCE"), True),
    **dict.fromkeys((3, "3", "VLLM_COMPILE"), False),
}
_OTHERS = frozenset(
    """backend cache_dir compile_cache_save_format compile_mm_encoder compile_ranges_endpoints compile_sizes
    cudagraph_copy_inputs cudagraph_decoder_replay cudagraph_mm_encoder cudagraph_num_of_warmups
    cudagraph_specialize_lora custom_ops debug_dump_path decoder_replay_cudagraph_capture_sizes
    decoder_replay_trim_threshold dynamic_shapes_config encoder_cudagraph_max_frames_per_batch
    encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_token_budgets fast_moe_cold_start
    full_cuda_graph inductor_compile_config inductor_passes ir_enable_torch_wrap splitting_ops use_inductor
    use_inductor_graph_partition""".split()
)


def read_compilation(given: Any) -> dict[str, Any]:
    """Return the options that a compilation_config sets. given: an object, its JSON, or a level from 0 to 3, as in
    earlier versions. Raises ConfigError."""
    value = read_json("compilation_config", given) if isinstance(given, str) else given
    if value in (0, 1, 2, 3) and not isinstance(value, bool):
        return {"enforce_eager": True} if value == 0 else {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"compilation_config must be a JSON object, got {value!r}")
    options: dict[str, Any] = {}
    for name, field in value.items():
        if field is not None:
            options |= _options(name, field)
    return options


def _options(name: str, value: Any) -> dict[str, Any]:
    """Return the options that a field sets."""
    if name in ("mode", "level"):
        return {"torch_compile": _compiles(name, value)}
    if name in ("cudagraph_mode", "use_cudagraph"):
        return {"enforce_eager": True} if value in ("NONE", "none", 0, False) else {}
    if name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        return {name: value}
    if name == "pass_config":
        return _passes(value)
    if name not in _OTHERS:
        raise ConfigError(f"compilation_config has no field {name!r}")
    _logger.warning("compilation_config: %s has no effect: see torch_compile and enforce_eager", name)
    return {}


def _compiles(name: str, mode: Any) -> bool:
    if not isinstance(mode, int | str) or isinstance(mode, bool) or mode not in _MODES:
        modes = ", ".join(str(mode) for mode in _MODES if isinstance(mode, int))
        raise ConfigError(f"compilation_config: {name} must be one of {modes}, got {mode!r}")
    return _MODES[mode]


def _passes(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"compilation_config: pass_config must be a JSON object, got {given!r}")
    options = {}
    for name, value in given.items():
        if name in ("enable_sp", "enable_sequence_parallelism"):
            options["enable_sequence_parallel"] = bool(value)
        elif value:
            _logger.warning("compilation_config: pass_config.%s has no effect: Quire's kernels are fused already", name)
    return options
