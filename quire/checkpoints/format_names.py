"""The common name of a checkpoint's weight format: safetensors BF16, GPTQ 4-bit, GGUF Q4_K_M."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Any

from quire.checkpoints.gguf import GgufFile
from quire.checkpoints.hub import gguf_kinds

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "autoawq": "AWQ", "auto-round": "AutoRound", "fp8": "FP8", "fbgemm_fp8": "FP8",
    "marlin": "Marlin", "hqq": "HQQ", "bitnet": "BitNet", "mxfp4": "MXFP4", "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt",
}  # fmt: skip
_FILE_TYPES = {  # general.file_type, by llama.cpp's numbers
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS",
    20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
    39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
_GGUF_TYPES = {  # bits per weight in memory on CPUs, with its share of group and super-block; all others are floats
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q2_K": 3.125, "Q3_K": 3.5625, "Q4_K": 4.625,
    "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.5, "NVFP4": 5, "IQ1_S": 4.3125,
    "IQ1_M": 4.5625, "IQ2_XXS": 4.3125, "IQ2_XS": 4.5625, "IQ2_S": 4.5625, "IQ3_XXS": 4.3125, "IQ3_S": 4.3125,
    "TQ1_0": 4.0625, "TQ2_0": 4.0625, "Q1_0": 4.125, "Q2_0": 4.25,
}  # fmt: skip


def weight_files(names: Collection[str]) -> list[str]:
    """Return the files of a model that contain weights."""
    return sorted(name for name in names if name.endswith(_WEIGHTS))


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """Return the quantization format of a checkpoint with this config.json, None if it is not quantized."""
    settings = _settings(config)
    if not settings:
        return None
    method = str(settings.get("quant_method", "compressed-tensors")).lower()
    bits: Any = settings.get("bits") or settings.get("w_bit") or _nested(settings).get("bits")
    if "config_groups" in settings:
        weights = _weights_of_group(settings)
        if weights.get("type") == "float":
            return f"{method} FP{weights.get('num_bits', 8)}"
        bits = weights.get("num_bits")
    name = _METHODS.get(method, method)
    return f"{name} {bits}-bit" if bits else name


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = config.get("quantization_config") or config.get("compression_config")
    return settings if isinstance(settings, Mapping) else {}


def _weights_of_group(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how the weights of the first group of layers are quantized, in a checkpoint of compressed-tensors."""
    groups = settings["config_groups"]
    group: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _nested(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the bits and group_size of weights in the formats that nest them, HQQ and torchao. Empty for other
    formats, and if the settings differ between kinds of layers."""
    options = settings.get("quant_config")
    kinds = settings.get("quant_type")
    weights = options.get("weight_quant_params") if isinstance(options, Mapping) else None
    if isinstance(weights, Mapping):
        return {"bits": weights.get("nbits"), "group_size": weights.get("group_size")}
    kind = kinds.get("default") if isinstance(kinds, Mapping) else None
    if not isinstance(kind, Mapping):
        return {}
    fields = kind.get("_data")
    group = fields.get("group_size") if isinstance(fields, Mapping) else None
    return {"bits": 4 if str(kind.get("_type")).startswith("Int4") else 8, "group_size": group}


def format_of(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the format, from config.json and the names of all files of a checkpoint. "no weights" if there are
    none."""
    weights = weight_files(names)
    if not weights:
        return "no weights"
    kind = PurePath(weights[0]).suffix.removeprefix(".")
    if kind == "gguf":
        return " ".join(["GGUF", ", ".join(sorted(gguf_kinds(weights)))]).rstrip()
    if (quantization := quantization_of(config)) is not None:
        return quantization
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    named = next((c[key] for c in (config, inner) for key in ("dtype", "torch_dtype") if c.get(key)), "")
    library = "safetensors" if kind == "safetensors" else "pytorch"
    return f"{library} {_TYPES.get(str(named), '')}".rstrip()


def gguf_format(gguf: GgufFile) -> str:
    """Return the file type from the metadata or, without it, the type of most parameters."""
    number = gguf.metadata.get("general.file_type")
    if isinstance(number, int) and number in _FILE_TYPES:
        return f"GGUF {_FILE_TYPES[number]}"
    sizes = Counter[str]()
    for tensor in gguf.tensors.values():
        sizes[tensor.kind.name] += math.prod(tensor.shape)
    return " ".join(["GGUF", *(kind for kind, _ in sizes.most_common(1))])


def gguf_bytes(kind: str) -> float:
    """Return the bytes per parameter in memory, by the type of its tensor in a GGUF file."""
    return _GGUF_TYPES.get(kind, 16) / 8


def quantized_bytes(config: Mapping[str, Any], scale_bytes: int = 2) -> float:
    """Return the bytes per parameter of a quantized layer, as far as config.json shows. A scale takes two bytes in
    memory, and may take more in files."""
    settings = _settings(config)
    nested = _nested(settings)
    group: Any = settings.get("group_size") or settings.get("q_group_size") or nested.get("group_size") or 0
    bits: Any = settings.get("bits") or settings.get("w_bit") or nested.get("bits") or 8
    has_offsets = True
    if (floats := _four_bit_floats(settings)) is not None:
        bits = 4
        group = floats
        has_offsets = False
    elif "config_groups" in settings:
        weights = _weights_of_group(settings)
        bits = weights.get("num_bits") or 8
        group = weights.get("group_size") or 0
        has_offsets = not weights.get("symmetric", True)
    width = int(bits)
    size = int(group)
    if width > 8:
        return width / 8
    of_group = scale_bytes + (4 if has_offsets else 0)  # offsets are float32
    return (width if width <= 6 else 8) / 8 + (of_group / size if size > 0 else 0.0)


def _four_bit_floats(settings: Mapping[str, Any]) -> int | None:
    """Return the number of weights that share a scale in a format with 4-bit floats; None for other formats."""
    method = str(settings.get("quant_method", "")).lower()
    if method == "bitsandbytes":
        return 64 if settings.get("load_in_4bit") else None
    if method.startswith("modelopt"):
        return 16 if settings.get("quant_algo") == "NVFP4" else None
    return 32 if method == "mxfp4" else None
