"""Layers that other packages quantized and saved mean to Quire what they mean to these packages.

tests/data/quantized_layers/record.py says how they were recorded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quire.checkpoints.formats.config import extra_tensors, quantization_method
from quire.checkpoints.formats.scheme import QuantizedWeight
from quire.checkpoints.presented import presented
from quire.checkpoints.weights import SafetensorsCheckpoint, load_weights
from quire.layers.build import Builder
from quire.layers.linear import LinearShape, make_weight
from quire.layers.specs import OutputPart
from quire.ops import Kernels, Target

FOLDER = Path(__file__).parents[1] / "data" / "quantized_layers"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.safetensors")), ids=lambda file: file.stem)
def test_a_layer_has_the_weights_that_its_package_makes_of_it(tmp_path, file):
    shutil.copy(file, tmp_path / "model.safetensors")
    with safe_open(file, framework="pt") as tensors:
        config = {"quantization_config": json.loads(tensors.metadata()["quantization_config"])}
        dequantized = tensors.get_tensor("dequantized")
    outputs, inputs = dequantized.shape
    checkpoint = presented(SafetensorsCheckpoint(tmp_path), config)
    kernels = Kernels(Target(torch.device("cpu"), torch.float32))
    builder = Builder(kernels, None, checkpoint.linear_method() or quantization_method(config, checkpoint.has))
    weight = make_weight(builder, LinearShape((OutputPart("q_proj", outputs, 0, outputs),), inputs, 0, inputs))
    load_weights(checkpoint, builder, (*extra_tensors(config), "^dequantized$"), show_progress=False)
    assert isinstance(weight, QuantizedWeight)
    torch.testing.assert_close(weight.dense(), dequantized, rtol=1e-6, atol=1e-7)
