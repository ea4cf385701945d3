"""Writes the files of this folder with the packages that define the formats: a layer as these save it, and the weights
that they make of it. Run it where they are installed: `python record.py hqq` (0.2.8) or `torchao` (0.18)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent


def layer() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(128, 16, bias=False)


def save(name: str, tensors: dict, dequantized: torch.Tensor, settings: dict, metadata: dict | None = None) -> None:
    tensors = {**tensors, "dequantized": dequantized.float().contiguous()}
    metadata = {**(metadata or {}), "quantization_config": json.dumps(settings)}
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata)


def record_hqq() -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    for bits in (1, 2, 4, 8):
        config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
        made = HQQLinear(layer(), config, compute_dtype=torch.float16, device="cpu")
        tensors = {f"q_proj.{name}": tensor for name, tensor in made.state_dict().items()}
        exact = {**made.meta, "compute_dtype": torch.float32}  # or the product would be rounded to float16
        exact |= {name: made.meta[name].float() for name in ("scale", "zero")}
        settings = {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}
        save(f"hqq-{bits}-bits", tensors, Quantizer.dequantize(made.W_q, exact), settings)


def record_torchao() -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8Tensor,
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        PerTensor,
        quantize_,
    )

    groups = PerGroup(32)
    for name, config in {
        "int8": Int8WeightOnlyConfig(),
        "int8-groups": Int8WeightOnlyConfig(granularity=groups),
        "int8-dynamic": Int8DynamicActivationInt8WeightConfig(),
        "intx-4-bits": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups),
        "float8": Float8WeightOnlyConfig(),
        "float8-tensor": PerTensor(),
    }.items():
        model = torch.nn.ModuleDict({"q_proj": layer()})
        if isinstance(config, PerTensor):  # what the configs with dynamic activations make of it, on GPUs only
            weight = Float8Tensor.from_hp(model["q_proj"].weight.data, granularity=config)
            model["q_proj"].weight = torch.nn.Parameter(weight, requires_grad=False)
        else:
            quantize_(model, config)
        tensors, metadata = flatten_tensor_state_dict(model.state_dict())
        dequantized = model["q_proj"].weight.dequantize()
        save(f"torchao-{name}", tensors, dequantized, {"quant_method": "torchao"}, metadata)


if __name__ == "__main__":
    {"hqq": record_hqq, "torchao": record_torchao}[sys.argv[1]]()
