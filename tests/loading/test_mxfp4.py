"""gpt-oss as it is published: experts in MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.loading.mxfp4 import decode_mxfp4
from support.checkpoints import write_checkpoint
from support.engines import make_llm, teacher_forced_logits

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


def test_every_value_of_the_format_is_decoded():
    blocks = torch.tensor([[[17 * i for i in range(16)]]], dtype=torch.uint8)  # each value twice
    decoded = decode_mxfp4(blocks, torch.tensor([[130]], dtype=torch.uint8))
    assert decoded[0].tolist() == [8 * v for v in VALUES for _ in range(2)]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_experts_in_mxfp4_are_the_dense_ones_that_they_stand_for(tmp_path, backend):
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16}
    dense = write_checkpoint(tmp_path / "dense", "gpt_oss", config)
    packed = Path(shutil.copytree(dense, tmp_path / "packed"))
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
    text = list(range(10, 60))
    expected = teacher_forced_logits(make_llm(dense, backend), text)
    assert torch.equal(teacher_forced_logits(make_llm(packed, backend), text), expected)
