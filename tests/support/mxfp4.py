"""Checkpoints of gpt-oss with experts in MXFP4, written value by value, and the dense ones that they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.checkpoints import write_checkpoint

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def encode(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(blocks, scales, what they stand for) of [experts, out, in], value by value."""
    experts, out, inputs = weight.shape
    blocks = torch.zeros(experts, out, inputs // 32, 16, dtype=torch.uint8)
    scales = torch.zeros(experts, out, inputs // 32, dtype=torch.uint8)
    rounded = torch.zeros_like(weight)
    table = torch.tensor(VALUES)
    grouped = weight.view(experts, out, inputs // 32, 32)
    exponents = grouped.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2
    scales[:] = (exponents + 127).to(torch.uint8)
    codes = ((grouped / 2 ** exponents[..., None])[..., None] - table).abs().argmin(-1)
    rounded[:] = (table[codes] * 2 ** exponents[..., None]).view_as(weight)
    for i in range(16):
        blocks[..., i] = (codes[..., 2 * i] + 16 * codes[..., 2 * i + 1]).to(torch.uint8)
    return blocks, scales, rounded


def write_mxfp4(directory: Path) -> tuple[Path, Path]:
    """(a checkpoint in MXFP4, a dense checkpoint of the weights it means)"""
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16}
    dense = write_checkpoint(directory / "dense", "gpt_oss", config)
    packed = Path(shutil.copytree(dense, directory / "packed"))
    tensors = load_file(dense / "model.safetensors")
    stored = dict(tensors)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, rounded = encode(tensors[name].transpose(1, 2))
        tensors[name] = rounded.transpose(1, 2).contiguous()
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((packed / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(settings))
    return packed, dense
