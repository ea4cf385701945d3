"""What is wrong with a checkpoint of torchao, or not supported, is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoints.errors import WeightError
from quire.checkpoints.formats.config import quantization_method
from quire.checkpoints.formats.torchao import TorchaoCheckpoint
from quire.checkpoints.weights import SafetensorsCheckpoint, TorchCheckpoint
from quire.layers.build import WeightSlot
from quire.layers.linear import DenseWeight

BYTES = {"qdata": torch.zeros(4, 8, dtype=torch.int8), "scale": torch.ones(4, 1)}


def opened(folder: Path, entry: Any, tensors: dict[str, torch.Tensor], name: str = "a.weight") -> TorchaoCheckpoint:
    metadata = {"tensor_names": json.dumps([name]), name: json.dumps(entry)}
    layer, _, parameter = name.rpartition(".")
    stored = {f"{layer}._{parameter}_{end}": tensor for end, tensor in tensors.items()}
    save_file({**stored, "b.weight": torch.ones(3, 3)}, folder / "model.safetensors", metadata)
    return TorchaoCheckpoint(SafetensorsCheckpoint(folder))


def test_layers_that_the_metadata_do_not_list_are_dense(tmp_path):
    checkpoint = opened(tmp_path, {"_type": "Int8Tensor", "_data": {"block_size": [1, 8]}}, BYTES)
    assert set(checkpoint.names) == {"a.weight", "a.weight_scale", "b.weight"}
    method = checkpoint.linear_method()
    assert method("b") is DenseWeight
    assert method("a") is not DenseWeight


@pytest.mark.parametrize(
    ("entry", "tensors", "message"),
    [
        ({"_type": "MXTensor", "_data": {}}, BYTES, "a.weight has _type='MXTensor', .*supported: Int8Tensor"),
        ({"_type": "Int4Tensor", "_data": {}}, {**BYTES, "act_pre_scale": torch.ones(8)}, "a.weight has act_pre_scale"),
        ({"_type": "Int8Tensor", "_data": {}}, {"qdata": BYTES["qdata"]}, r"a.weight \(Int8Tensor\) lacks scale"),
        ({"_type": "Int8Tensor", "_data": {"block_size": [8]}}, BYTES, r"a.weight has block_size=\[8\], but a"),
        ({"_type": "Int8Tensor", "_data": {"block_size": 8}}, BYTES, "a.weight has block_size=8, but a weight has two"),
        ({"_type": "Int8Tensor", "_data": {"shape": ["4", 8]}}, BYTES, r"a.weight has shape=\['4', 8\], but a weight"),
        ({"_type": "Int8Tensor", "_data": [1, 8]}, BYTES, r"a.weight has _data=\[1, 8\], which has no fields"),
        ({"type": "Int8Tensor"}, BYTES, "metadata of torchao's tensors cannot be read: KeyError"),
        ("Int8Tensor", BYTES, "metadata of torchao's tensors cannot be read"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, entry, tensors, message):
    with pytest.raises(WeightError, match=message):
        opened(tmp_path, entry, tensors)


def test_words_that_are_no_tiles_are_named(tmp_path):
    tensors = {"qdata": torch.zeros(1, 1, 16, 4, dtype=torch.int32), "scale_and_zero": torch.ones(1, 8, 2)}
    entry = {"_type": "Int4TilePackedTo4dTensor", "_data": {"shape": [8, 64], "block_size": [1, 64]}}
    slot = WeightSlot("a.weight_codes", torch.empty(8, 64, dtype=torch.uint8), (8, 64))
    with pytest.raises(WeightError, match=r"a._weight_qdata has shape \(1, 1, 16, 4\), which are no tiles"):
        opened(tmp_path, entry, tensors).copy_into(slot)


def test_experts_in_one_tensor_are_named(tmp_path):
    entry = {"_type": "Int8Tensor", "_data": {"block_size": [1, 1, 8]}}
    with pytest.raises(WeightError, match=r"experts.gate_up_proj has _type='Int8Tensor'.*of weights of linear layers"):
        opened(tmp_path, entry, BYTES, "a.experts.gate_up_proj")


class Int4Objects:  # stands for torchao's class, which is not installed; a pickle has its name alone
    pass


def test_pickled_objects_are_refused(tmp_path):
    torch.save({"a.weight": Int4Objects()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"it needs the Python object \S*Int4Objects; save the model as \*.safetens"):
        TorchCheckpoint(tmp_path)
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"torchao are read from \*.safetensors only"):
        TorchaoCheckpoint(TorchCheckpoint(tmp_path))


def test_dummy_weights_need_another_format():
    method_of = quantization_method({"quantization_config": {"quant_method": "torchao"}})
    with pytest.raises(ValueError, match="only the checkpoint says how a layer is quantized"):
        method_of("model.layers.0.mlp.up_proj")
