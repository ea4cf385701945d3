"""The quantization scheme of each layer, from config.json's `quantization_config` and the checkpoint's tensors."""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from quire.checkpoints.formats.integers import AWQ, GPTQ, PackedIntegers
from quire.checkpoints.formats.scaled import ScaledBytes
from quire.checkpoints.formats.scheme import Scheme
from quire.checkpoints.formats.settings import SchemeOf, Settings, check_field, group_size_of
from quire.checkpoints.formats.tables import BITSANDBYTES_BLOCK, MODELOPT_NVFP4, MXFP4, NVFP4, TableCodes
from quire.checkpoints.formats.ternary import Ternary
from quire.config.engine import ConfigError
from quire.layers.linear import DenseWeight, LinearMethod

# Tensors of quantized checkpoints that Quire does not need: activations and the KV cache keep the model's type, the
# zero points of symmetric weights are constant, and GPTQ writes zero biases where the model has none.
_EXTRA = r"\.(weight_shape|(input|output|k|v|q|input_global)_scale|(input|weight)_zero_point)$|(_proj|\.w[123])\.bias$"

# Further tensors of HQQ's layers, redundant with the settings and the tensors' shapes
_HQQ_STATE = (
    r"\.(nbits|group_size|shape|axis|packing|unpack_view_dtype|view_as_float|quant_scale|quant_zero|compute_dtype|"
    r"offload_meta|encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero)$"
)


def _settings(config: Mapping[str, Any]) -> Settings:
    return config.get("quantization_config") or config.get("compression_config") or {}


def quantization_kind(config: Mapping[str, Any]) -> str | None:
    """Return the `quant_method` of a checkpoint with this config.json; None if it is not quantized."""
    settings = _settings(config)
    return str(settings.get("quant_method", "compressed-tensors")).lower() if settings else None


def check_format(option: str | None, config: Mapping[str, Any], is_gguf: bool) -> None:
    """Raises ConfigError if --quantization names a different format from that of the checkpoint with this
    config.json."""
    if option in (None, "int8", "int4") or (option == "fp8" and not is_gguf and not _settings(config)):
        return
    kind = "gguf" if is_gguf else quantization_kind(config) or ""
    known = sorted({*map(_plain, _METHODS), "gguf"})
    if _plain(option) not in known:
        listed = ", ".join(["int8", "int4", *known])
        raise ConfigError(f"quantization={option!r} is not supported by Quire yet; supported: {listed}")
    if not is_gguf and not _settings(config):
        raise ConfigError(
            f"quantization={option!r} names the format of a quantized checkpoint, but this one is not quantized; leave "
            "it out, or let int8, int4 or fp8 quantize the weights while they are loaded"
        )
    if _plain(kind) != _plain(option):
        raise ConfigError(
            f"quantization={option!r} does not fit the checkpoint, which is quantized with "
            f"{_plain(kind)!r}; give that name, or leave the option out"
        )


def _plain(kind: str) -> str:
    """Return a format's name without the part that selects vLLM's kernels: gptq_marlin becomes gptq."""
    plain = kind.lower().replace("_", "-").removesuffix("-marlin").removeprefix("gpt-oss-")
    return {"autoawq": "awq", "inc": "auto-round", "modelopt-fp4": "modelopt"}.get(plain, plain)


def extra_tensors(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return patterns for the names of tensors that are not parameters, in a checkpoint with this config.json."""
    if not _settings(config):
        return ()
    return (_EXTRA, r"\.workspace$", *([_HQQ_STATE] if quantization_kind(config) == "hqq" else []))


def quantization_method(
    config: Mapping[str, Any], has: Callable[[str], bool] | None = None
) -> Callable[[str], LinearMethod]:
    """Return the `method_of` of a `Builder` for a checkpoint with this config.json.

    has: returns whether the checkpoint has a tensor of a name, which shows which layers are quantized. Without it
    (dummy weights), the config's lists of exceptions decide. Raises ValueError for an unsupported format.
    """
    settings = _settings(config)
    kind = quantization_kind(config)
    if kind is None:
        return lambda name: DenseWeight
    if kind not in _METHODS:
        listed = ", ".join([*_METHODS, "GGUF files"])
        raise ValueError(f"checkpoints quantized with {kind!r} are not supported: supported: {listed}")
    scheme_of = _METHODS[kind](settings)
    exceptions = _exceptions(settings)

    def method_of(name: str) -> LinearMethod:
        scheme = scheme_of(name)
        if scheme is None:
            return DenseWeight
        quantized = has(f"{name}.{scheme.marker}") if has else not matches(name, exceptions)
        return scheme if quantized else DenseWeight

    return method_of


def _exceptions(settings: Settings) -> list[str]:
    fields = (
        "ignore",
        "ignored_layers",
        "modules_to_not_convert",
        "exclude_modules",
        "llm_int8_skip_modules",
        "skip_modules",
    )
    lists = [settings.get(name) or () for name in fields]
    return [name for names in lists for name in names] + ([] if settings.get("lm_head") else ["lm_head"])


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the name. A pattern is one or more whole components of a name, or "re:" and a regular
    expression that matches its beginning.

    A pattern with * is matched like a file name.

    A text model may lie inside a larger model. Its config then uses the names of the larger model.
    """
    bare = name.removeprefix("model.")
    names = (name, f"language_model.{name}", f"model.language_model.{bare}", f"model.{name}")
    for pattern in patterns:
        if pattern.startswith("re:"):
            if any(re.match(pattern[3:], n) for n in names):
                return True
        elif "*" in pattern:
            if any(fnmatchcase(n, pattern) for n in names):
                return True
        elif any(f".{pattern}." in f".{n}." for n in names):
            return True
    return False


def _block(settings: Settings, field: str) -> tuple[int, int]:
    block = settings.get(field)
    pair = block.split("x") if isinstance(block, str) else block
    if not isinstance(pair, list) or len(pair) != 2 or not all(str(n).isdigit() and int(n) for n in pair):
        raise ValueError(f"quantization_config has {field}={block!r}, which is no pair of numbers")
    return int(pair[0]), int(pair[1])


def _marlin(settings: Settings) -> SchemeOf:
    from quire.checkpoints.formats.marlin import scheme_of

    return scheme_of(settings)


def _hqq(settings: Settings) -> SchemeOf:
    from quire.checkpoints.formats.hqq import scheme_of

    return scheme_of(settings)


def _torchao(settings: Settings) -> SchemeOf:
    from quire.checkpoints.formats.torchao import scheme_of

    return scheme_of(settings)


def _gptq(settings: Settings) -> SchemeOf:
    form = "marlin" if settings.get("is_marlin_format") else settings.get("checkpoint_format", "gptq")
    if check_field({"checkpoint_format": form}, "checkpoint_format", ("gptq", "gptq_v2", "marlin")) == "marlin":
        return _marlin(settings)
    overrides: Settings = settings.get("dynamic") or {}  # by GPTQModel; the checkpoint shows which layers are dense

    def scheme_of(name: str) -> Scheme:
        merged = dict(settings)
        for pattern, changes in overrides.items():
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), name):
                merged |= changes
                break
        return GPTQ(check_field(merged, "bits", (2, 3, 4, 8)), group_size_of(merged), 1 if form == "gptq" else 0)

    scheme_of("")
    return scheme_of


def _awq(settings: Settings) -> SchemeOf:
    check_field(settings, "bits", (4,), settings.get("w_bit", 4))
    settings = {"group_size": settings.get("q_group_size", 128), **settings}
    version = str(settings.get("version", "gemm")).lower()
    if check_field({"version": version}, "version", ("gemm", "marlin")) == "marlin":
        return _marlin(settings)
    scheme = AWQ(group_size_of(settings))
    return lambda name: scheme


def _auto_round(settings: Settings) -> SchemeOf:
    check_field(settings, "extra_config", (None, {}))  # options of single layers
    packing = check_field(settings, "packing_format", ("auto_round:auto_gptq", "auto_round:auto_awq"))
    return _awq(settings) if packing.endswith("awq") else _gptq(settings)


def _fp8(settings: Settings) -> SchemeOf:
    check_field(settings, "fmt", ("e4m3", "float8_e4m3fn", None))
    scheme = ScaledBytes(torch.float8_e4m3fn, (-1, -1))
    if settings.get("weight_block_size") is not None:
        scheme = ScaledBytes(torch.float8_e4m3fn, _block(settings, "weight_block_size"), "weight_scale_inv")
    return lambda name: scheme


def _compressed_tensors(settings: Settings) -> SchemeOf:
    sparsity = settings.get("sparsity_config") or {}
    transforms = settings.get("transform_config") or {}
    check_field(sparsity, "format", ("dense",), "dense")
    check_field(transforms, "config_groups", (None, {}))
    groups = [
        (group.get("targets") or [], _compressed_group({"format": settings.get("format"), **group}))
        for group in (settings.get("config_groups") or {}).values()
    ]

    def scheme_of(name: str) -> Scheme | None:
        linear = next((scheme for targets, scheme in groups if "Linear" in targets), None)
        return next((scheme for targets, scheme in groups if matches(name, targets)), linear)

    return scheme_of


def _compressed_group(group: Settings) -> Scheme:
    weights = group.get("weights") or {}
    tables = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}
    others = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    form = check_field(group, "format", (*others, *tables))
    if form in tables:
        check_field(weights, "num_bits", (4,))
        check_field(weights, "group_size", (tables[form].group,), tables[form].group)
        return tables[form]
    size = group_size_of({"group_size": weights.get("group_size") or -1})
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")
    symmetric = bool(weights.get("symmetric", True))
    act_order = weights.get("actorder") in ("group", "dynamic", True)
    if form == "pack-quantized":
        check_field(weights, "type", ("int",))
        check_field({"strategy": strategy}, "strategy", ("group", "channel"))
        return PackedIntegers(check_field(weights, "num_bits", range(2, 9)), size, symmetric, act_order)
    check_field(weights, "num_bits", (8,))
    dtype = {"int": torch.int8, "float": torch.float8_e4m3fn}[check_field(weights, "type", ("int", "float"))]
    check_field({"strategy": strategy}, "strategy", ("tensor", "channel", "group", "block"))
    blocks = {"tensor": (-1, -1), "channel": (1, -1), "group": (1, size)}
    block = blocks.get(strategy) or _block(weights, "block_structure")
    return ScaledBytes(dtype, block, symmetric=symmetric or dtype.is_floating_point)


def _modelopt(settings: Settings) -> SchemeOf:
    schemes = {
        "FP8": ScaledBytes(torch.float8_e4m3fn, (-1, -1)),
        "FP8_PER_CHANNEL_PER_TOKEN": ScaledBytes(torch.float8_e4m3fn, (1, -1)),
        "NVFP4": MODELOPT_NVFP4,
    }
    scheme = schemes[check_field(settings, "quant_algo", schemes)]
    if scheme is MODELOPT_NVFP4:
        check_field(settings, "group_size", (16,), 16)
    return lambda name: scheme


def _bitsandbytes(settings: Settings) -> SchemeOf:
    scheme: Scheme = ScaledBytes(torch.int8, (1, -1))
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        table = check_field(settings, "bnb_4bit_quant_type", ("fp4", "nf4"), "fp4")
        scheme = TableCodes(table, BITSANDBYTES_BLOCK, torch.float32)
    return lambda name: scheme


def _bitnet(settings: Settings) -> SchemeOf:
    kind = check_field(settings, "linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    mode = check_field(settings, "quantization_mode", ("offline", "online"), "offline")
    check_field(settings, "use_rms_norm", (False,), False)
    at_load = kind == "autobitlinear" and mode == "online"
    scheme = Ternary("weight" if at_load else "weight_scale", multiplies=kind == "autobitlinear")
    kept = settings.get("modules_to_not_convert") or ()
    return lambda name: scheme if name.endswith("_proj") and not matches(name, kept) else None


_METHODS: dict[str, Callable[[Settings], SchemeOf]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": lambda settings: lambda name: ScaledBytes(torch.float8_e4m3fn, (1, -1)),
    "gptq": _gptq,
    "awq": _awq,
    "autoawq": _awq,
    "auto-round": _auto_round,
    "marlin": _marlin,
    "hqq": _hqq,
    "torchao": _torchao,
    "mxfp4": lambda settings: lambda name: MXFP4 if ".experts." in name else None,  # gpt-oss
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "bitnet": _bitnet,
    "bitsandbytes": _bitsandbytes,
}
