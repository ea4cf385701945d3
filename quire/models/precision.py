"""Chooses the types in which a model computes and stores."""

import math
from pathlib import Path

import torch

from quire.checkpoints.gguf import read_gguf
from quire.config.engine import EngineConfig, ModelConfig
from quire.ops import Target

_MOST_DENSE = 0.05  # share of the weights in matrices of floats, which would take twice as long in float32


def resolve_dtype(options: ModelConfig) -> torch.dtype:
    """Return the type of a model that computes in one type."""
    dtype: torch.dtype = getattr(torch, options.dtype_name)
    return dtype


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def target_of(config: EngineConfig, directory: Path, device: torch.device) -> Target:
    """Return the device and the types of a model. directory: its directory or GGUF file. Raises WeightError.

    By default, quantized GGUF files on CPUs compute in float32 between products, and cache float16. In bfloat16, their
    outputs can diverge more from those in float32 than llama.cpp's (benchmarks/results/2026-12-01-divergence.md).
    """
    invariant = config.kernels.batch_invariant
    if device.type == "cpu" and _leaves_types_open(config) and directory.is_file() and _is_quantized(directory):
        return Target(device, torch.float32, invariant, torch.float16)
    return Target(device, resolve_dtype(config.model), invariant)


def _leaves_types_open(config: EngineConfig) -> bool:
    """Whether the options name no type, and no part of the model has dense weights of its own."""
    speculation = config.scheduler.speculation
    has_drafter = speculation is not None and speculation.on_device
    options = config.model
    is_auto = options.dtype == "auto" and config.cache.kv_cache_dtype == "auto"
    return is_auto and options.runner != "pooling" and not has_drafter


def _is_quantized(file: Path) -> bool:
    tensors = dict(read_gguf(file).tensors)
    if "output.weight" in tensors:  # then the embedding is a table, no matrix
        tensors.pop("token_embd.weight", None)
    sizes = {True: 0, False: 0}
    for tensor in tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.kind.is_float] += math.prod(tensor.shape)
    return sizes[True] <= _MOST_DENSE * sum(sizes.values())
