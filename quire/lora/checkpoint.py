"""Reads adapters in PEFT's format: adapter_config.json and the matrices lora_A and lora_B of each module."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.layers.lora import Matrices
from quire.lora.files import CONFIG, adapter_files, read_config
from quire.lora.patterns import values_by_module
from quire.messages.errors import error_text

_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_LONGEST = 1_000  # characters of a tensor's name
_LARGEST = 1e30  # of alpha
# Options that make an adapter more than B A x; false or empty values have no effect.
_UNSUPPORTED = """use_dora modules_to_save trainable_token_indices target_parameters layer_replication megatron_config
    use_qalora alora_invocation_tokens lora_bias arrow_config corda_config use_bdlora""".split()


def read_adapter(directory: Path) -> Matrices:
    """Return the adapter's matrices by module, with the scale multiplied into B.

    Raises ValueError with the reason if the files cannot be read, or if the adapter is of an unsupported kind.
    """
    _, weights = adapter_files(directory)
    config = read_config(directory)
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ValueError(f"the adapter is of type {str(kind)[:100]}; only LORA is supported")
    if extra := [name for name in _UNSUPPORTED if config.get(name)]:
        raise ValueError(f"the adapter has {extra[0]}, which is not supported: it is more than two matrices a layer")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"the adapter has bias={_shown(bias)}, biases of the model's layers; only 'none' is supported")
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(weights).items():
        match = _NAME.fullmatch(name) if len(name) <= _LONGEST else None
        if match is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise ValueError(f"{weights.name} has a tensor {name[:200]}, which is no matrix of LoRA")
        halves.setdefault(match[1], {})[match[3]] = tensor.float()
    if incomplete := [module for module, matrices in halves.items() if len(matrices) < 2]:
        raise ValueError(f"{weights.name} has only one of the two matrices of {incomplete[0]}")
    if not halves:
        raise ValueError(f"{weights.name} has no matrices of LoRA")
    scales = _scales(config, {module: found["A"] for module, found in halves.items()})
    matrices = {module: (found["A"], scales[module] * found["B"]) for module, found in halves.items()}
    for module, (a, b) in matrices.items():
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise ValueError(f"{weights.name} has matrices of {module} with NaN or infinity")
    return matrices


def _tensors(weights: Path) -> dict[str, Any]:
    """Raises ValueError."""
    is_pickle = weights.suffix == ".bin"
    try:
        if not is_pickle:
            return load_file(weights)
        _check_archive(weights)
        tensors = torch.load(weights, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises many types of errors
        raise ValueError(f"{weights} cannot be read: {error_text(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise ValueError(f"{weights} cannot be read: it is no table of tensors")
    # With strides of 0, a tensor may be much larger than its part of the file, and takes its full memory when it is
    # converted.
    size = sum(4 * tensor.numel() for tensor in tensors.values() if isinstance(tensor, Tensor))
    if size > 8 * weights.stat().st_size:
        raise ValueError(f"{weights} cannot be read: its tensors are {size >> 20:,} MiB, much more than the file")
    return tensors


def _check_archive(weights: Path) -> None:
    """Raises ValueError for a torch.save file with compressed parts, which could be of any size."""
    with zipfile.ZipFile(weights) as archive:
        parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise ValueError("its parts are compressed, which torch.save never does")
    if sum(part.file_size for part in parts) > weights.stat().st_size:
        raise ValueError("its parts are larger than the file")


def _scales(config: Mapping[str, Any], matrices: Mapping[str, Tensor]) -> dict[str, float]:
    """Return alpha / rank by module; with rsLoRA (arXiv:2312.03732), alpha / sqrt(rank). matrices: A."""
    ranks, alphas = (
        values_by_module(f"{CONFIG}: {short}_pattern", config.get(f"{short}_pattern") or {}, list(matrices))
        for short in ("rank", "alpha")
    )
    scales = {}
    for module, a in matrices.items():
        rank: Any = ranks.get(module, config.get("r"))
        alpha: Any = alphas.get(module, config.get("lora_alpha"))
        is_rank = isinstance(rank, int) and not isinstance(rank, bool)
        is_alpha = isinstance(alpha, int | float)
        if not is_rank or rank < 1 or not is_alpha or isinstance(alpha, bool) or not abs(alpha) < _LARGEST:
            given = f"r={_shown(rank)} and lora_alpha={_shown(alpha)}"
            raise ValueError(f"{CONFIG} has {given}, which must be numbers")
        if a.dim() == 2 and len(a) != rank:
            raise ValueError(f"{module} has rank {len(a)}, but {CONFIG} says {_shown(rank)}")
        scales[module] = float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
    return scales


def _shown(value: Any) -> str:
    text = str(type(value)) if isinstance(value, int) and abs(value) > _LARGEST else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
