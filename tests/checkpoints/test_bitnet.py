"""BitNet's ternary weights, packed or rounded when they are loaded, against the layers of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints.formats.ternary import TernaryWeight
from support.engines import make_llm, runner_of, runners_of_ranks, teacher_forced_logits
from support.reference import load, logits, prompts

TEXT = prompts(300, 9)[8][:60]
# By the class of transformers' layers: fields of quantization_config
KINDS = {
    "packed": {"linear_class": "bitlinear", "quantization_mode": "offline"},
    "packed-multiplied": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "rounded-at-load": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}


def written(source: Path, folder: Path, kind: str) -> tuple[Path, Any]:
    """A checkpoint of this kind, and transformers' model with the same weights."""
    from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors, network = load_file(folder / "model.safetensors"), load(source)
    for name, dense in list(network.named_modules()):
        if not name.endswith("_proj"):
            continue
        sizes = {"in_features": dense.in_features, "out_features": dense.out_features, "bias": dense.bias is not None}
        if kind == "rounded-at-load":
            layer = AutoBitLinear(**sizes, online_quant=True)
            layer.weight = dense.weight
        else:
            scale = dense.weight.abs().mean()
            ternary = (dense.weight / scale).round().clamp(-1, 1).detach()
            packed = pack_weights(ternary.clone())
            tensors[f"{name}.weight"] = packed
            if kind == "packed":
                layer, stored = BitLinear(**sizes, dtype=torch.float32), 1 / scale
                layer.weight = packed
            else:
                layer, stored = AutoBitLinear(**sizes), scale
                layer.weight = torch.nn.Parameter(ternary, requires_grad=False)
            tensors[f"{name}.weight_scale"] = stored.detach().view(1)
            layer.weight_scale = stored.detach().view(1)
        layer.bias = dense.bias
        network.set_submodule(name, layer)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", **KINDS[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, network


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.sampled(3))])
@pytest.mark.parametrize("kind", KINDS)
def test_ternary_weights_compute_what_those_of_transformers_do(checkpoints, tmp_path, kind, backend):
    source = checkpoints.path("bitnet")
    folder, network = written(source, tmp_path, kind)
    with torch.compiler.set_stance("force_eager"):  # its functions are compiled, which takes long
        expected = logits(network, TEXT)
    llm = make_llm(folder, backend)
    layer = runner_of(llm).model.layers[0]
    assert isinstance(layer.mixer.qkv.weight, TernaryWeight)
    assert isinstance(layer.mlp.down.weight, TernaryWeight)
    difference = (teacher_forced_logits(llm, TEXT) - expected).abs().mean() / expected.std()
    dense = (teacher_forced_logits(make_llm(source, backend), TEXT) - expected).abs().mean() / expected.std()
    # Activations next to the middle between two of 255 steps may be rounded to either.
    assert difference < 0.01 < 0.3 < dense


def test_ranks_cannot_divide_inputs_that_are_rounded_together(checkpoints, tmp_path):
    folder, _ = written(checkpoints.path("bitnet"), tmp_path, "packed")
    with pytest.raises(ValueError, match="set tensor_parallel_size to 1"):
        runners_of_ranks(folder, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"use_rms_norm": True}, "use_rms_norm=True"), ({"linear_class": "other"}, "linear_class='other'")],
)
def test_other_forms_are_named(checkpoints, tmp_path, fields, message):
    folder, _ = written(checkpoints.path("bitnet"), tmp_path, "packed")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        make_llm(folder)
