"""Reads adapters as PEFT saves them: adapter_config.json and the matrices lora_A and lora_B of each module."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.layers.lora import Matrices
from quire.loading.hub import read_json
from quire.lora.files import adapter_files
from quire.messages.errors import error_text

_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
# Options that make an adapter more than B A x; those that are false or empty do nothing.
_UNSUPPORTED = """use_dora modules_to_save trainable_token_indices target_parameters layer_replication megatron_config
    use_qalora alora_invocation_tokens lora_bias arrow_config corda_config use_bdlora""".split()


def read_adapter(directory: Path) -> Matrices:
    """The adapter's matrices by module, with its scale in B.

    Raises ValueError with the reason if the files cannot be read, or if the adapter is of an unsupported kind.
    """
    _, weights = adapter_files(directory)
    config = read_json(directory, "adapter_config.json", required=True)
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ValueError(f"the adapter is of type {kind}; only LORA is supported")
    if extra := [name for name in _UNSUPPORTED if config.get(name)]:
        raise ValueError(f"the adapter has {extra[0]}, which is not supported: it is more than two matrices a layer")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"the adapter has bias={bias!r}, biases of the model's layers; only 'none' is supported")
    is_pickle = weights.suffix == ".bin"
    try:
        tensors = torch.load(weights, map_location="cpu", weights_only=True) if is_pickle else load_file(weights)
    except Exception as error:  # unpickling raises many kinds
        raise ValueError(f"{weights} cannot be read: {error_text(error)}") from error
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise ValueError(f"{weights.name} has a tensor {name}, which is no matrix of LoRA")
        halves.setdefault(match[1], {})[match[3]] = tensor.float()
    if incomplete := [module for module, matrices in halves.items() if len(matrices) < 2]:
        raise ValueError(f"{weights.name} has only one of the two matrices of {incomplete[0]}")
    if not halves:
        raise ValueError(f"{weights.name} has no matrices of LoRA")
    return {module: (found["A"], _scale(config, module, found["A"]) * found["B"]) for module, found in halves.items()}


def _scale(config: Mapping[str, Any], module: str, a: Tensor) -> float:
    """alpha / rank; with rsLoRA (arXiv:2312.03732), alpha / the root of the rank."""
    rank, alpha = (
        _of_module(config.get(f"{short}_pattern") or {}, module, config.get(name))
        for short, name in (("rank", "r"), ("alpha", "lora_alpha"))
    )
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"adapter_config.json has r={rank!r} and lora_alpha={alpha!r}, which must be numbers")
    if a.dim() == 2 and len(a) != rank:
        raise ValueError(f"{module} has rank {len(a)}, but adapter_config.json says {rank}")
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _of_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as PEFT finds it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
