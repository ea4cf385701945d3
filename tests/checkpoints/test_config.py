"""What a config.json's quantization_config says of each layer, and what is refused."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from quire.checkpoints.formats.config import extra_tensors, quantization_method
from quire.checkpoints.formats.hqq import HQQ
from quire.checkpoints.formats.integers import AWQ, GPTQ, PackedIntegers
from quire.checkpoints.formats.marlin import Marlin
from quire.checkpoints.formats.scaled import ScaledBytes
from quire.checkpoints.formats.scheme import QuantizedWeight
from quire.checkpoints.formats.tables import MODELOPT_NVFP4, MXFP4, NVFP4, TableCodes
from quire.checkpoints.formats.ternary import Ternary
from quire.checkpoints.metadata import hf_config
from quire.layers.linear import DenseWeight
from support.engines import GREEDY, generate, make_llm, runner_of
from support.quantized import FORMATS, FURTHER, compressed, hqq, write_quantized

Q = "model.layers.3.self_attn.q_proj"
BLOCK = {"strategy": "block", "block_structure": "8x16"}
UP = "model.layers.3.mlp.up_proj"
FP8 = torch.float8_e4m3fn


def scheme(settings: dict[str, Any], name: str = Q) -> Any:
    return quantization_method({"quantization_config": settings}, lambda tensor: True)(name)


def test_a_checkpoint_without_quantization_is_dense():
    assert quantization_method({})(Q) is DenseWeight
    assert extra_tensors({}) == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, GPTQ(4, 128, 1)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}, GPTQ(8, -1, 0)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, AWQ(64)),
        ({"quant_method": "autoawq", "w_bit": 4, "q_group_size": 64}, AWQ(64)),
        ({"quant_method": "marlin", "group_size": 128}, Marlin(128)),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, Marlin(-1)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": True}, Marlin(128)),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, Marlin(128, "qweight", "scales")),
        (hqq(4, 64).config, HQQ(4, 64)),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
            GPTQ(4, 32, 1),
        ),
        ({"quant_method": "fp8"}, ScaledBytes(FP8, (-1, -1))),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            ScaledBytes(FP8, (128, 128), "weight_scale_inv"),
        ),
        ({"quant_method": "fbgemm_fp8"}, ScaledBytes(FP8, (1, -1))),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ScaledBytes(FP8, (-1, -1))),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, MODELOPT_NVFP4),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}), NVFP4),
        ({"quant_method": "bitnet"}, Ternary("weight_scale", multiplies=False)),
        ({"quant_method": "bitnet", "linear_class": "autobitlinear"}, Ternary("weight_scale", multiplies=True)),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            TableCodes("nf4", 64, torch.float32),
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ScaledBytes(torch.int8, (1, -1))),
        (
            compressed("pack-quantized", {"num_bits": 4, "group_size": 128, "strategy": "group"}),
            PackedIntegers(4, 128, True, False),
        ),
        (compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}), ScaledBytes(torch.int8, (1, -1))),
        (compressed("naive-quantized", {"num_bits": 8, "type": "float", **BLOCK}), ScaledBytes(FP8, (8, 16))),
    ],
)
def test_settings_become_schemes_that_compare_by_their_options(settings, expected):
    assert scheme(settings) == expected
    assert hash(scheme(settings)) == hash(expected)


def test_the_older_name_of_the_compressed_tensors_settings_is_known():
    settings = compressed("int-quantized", {"num_bits": 8, "strategy": "channel"})
    del settings["quant_method"]
    assert quantization_method({"compression_config": settings}, lambda name: True)(Q) != DenseWeight


def test_the_checkpoint_decides_which_layers_are_quantized():
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    method = quantization_method(config, lambda tensor: tensor == f"{Q}.qweight")
    assert method(Q) == GPTQ(4, -1, 1)
    assert method("model.layers.3.mlp.gate") is DenseWeight


@pytest.mark.parametrize(
    ("entry", "left_out"),
    [
        (Q, True),
        ("q_proj", True),
        ("model.layers.3", True),
        ("self_attn", True),
        ("language_model." + Q, True),
        ("re:.*self_attn.*", True),
        ("re:language_model.model.layers.[0-3].", True),
        ("q", False),
        ("mlp.gate", False),
        ("layers.30", False),
        ("re:self_attn", False),
    ],
)
@pytest.mark.parametrize("field", ["ignore", "ignored_layers", "modules_to_not_convert"])
def test_without_a_checkpoint_the_lists_of_exceptions_do(field, entry, left_out):
    method = quantization_method({"quantization_config": {"quant_method": "fp8", field: [entry]}})
    assert (method(Q) is DenseWeight) == left_out
    assert method("model.layers.5.mlp.gate_proj") is not DenseWeight
    assert method("lm_head") is DenseWeight


def test_kinds_of_layers_may_have_settings_of_their_own():
    kinds = {"self_attn.q_proj": hqq(8, None).config["quant_config"], "mlp.up_proj": hqq(4, 64).config["quant_config"]}
    settings = {"quant_method": "hqq", "quant_config": kinds}
    assert scheme(settings, Q) == HQQ(8, None)
    assert scheme(settings, UP) == HQQ(4, 64)
    assert scheme(settings, "model.layers.3.mlp.down_proj") is DenseWeight


def test_groups_of_layers_have_schemes_of_their_own():
    settings = compressed("pack-quantized", {"num_bits": 4, "group_size": 32, "strategy": "group"})
    settings["config_groups"]["group_1"] = {
        "targets": ["re:.*self_attn.*"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }
    assert scheme(settings, Q) == ScaledBytes(FP8, (1, -1))
    assert scheme(settings, UP) == PackedIntegers(4, 32, True, False)


def test_a_layer_that_no_group_has_is_dense():
    settings = compressed("int-quantized", {"num_bits": 8, "strategy": "channel"})
    settings["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    assert scheme(settings, Q) is DenseWeight
    assert scheme(settings, UP) == ScaledBytes(torch.int8, (1, -1))


def test_gptqmodel_may_give_single_layers_other_options():
    dynamic = {r"+:.*\.mlp\..*": {"bits": 8, "group_size": 64}, r"-:.*gate.*": {}}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic}
    assert scheme(settings, UP) == GPTQ(8, 64, 1)
    assert scheme(settings, Q) == GPTQ(4, 128, 1)


def test_the_settings_of_modelopt_may_be_in_a_file_of_their_own(tmp_path):
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "model.layers.0*"]}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    config = hf_config(tmp_path, {})
    assert quantization_method(config)(Q) == MODELOPT_NVFP4
    assert quantization_method(config)("model.layers.0.mlp.up_proj") is DenseWeight


def test_only_the_experts_of_a_checkpoint_in_mxfp4_are_quantized():
    method = quantization_method({"quantization_config": {"quant_method": "mxfp4"}})
    assert method("model.layers.0.mlp.experts.gate_up_proj") == MXFP4
    assert method(Q) is DenseWeight


def hqq_with(**weights: Any) -> dict[str, Any]:
    settings = hqq(4, 64).config
    given = {**settings["quant_config"]["weight_quant_params"], **weights}
    return {**settings, "quant_config": {**settings["quant_config"], "weight_quant_params": given}}


def pack(**weights: Any) -> dict[str, Any]:
    return compressed("pack-quantized", {"num_bits": 4, "group_size": 32, "strategy": "group", **weights})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "quark"}, "'quark' are not supported: supported: compressed-tensors, fp8"),
        ({"quant_method": "gptq", "bits": 5}, "bits=5, which is not supported; supported: 2, 3, 4, 8"),
        ({"quant_method": "gptq"}, "bits=None"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "many"}, "group_size='many', which is no number of inputs"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "exllama"}, "checkpoint_format='exllama'"),
        ({"quant_method": "gptq", "bits": 8, "is_marlin_format": True}, "bits=8"),
        ({"quant_method": "marlin", "desc_act": True}, "desc_act=True"),
        ({"quant_method": "marlin", "sym": False}, "sym=False"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin", "zero_point": True}, "zero_point=True"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {".*": {"bits": 7}}}, "bits=7"),
        ({"quant_method": "awq", "bits": 3}, "bits=3, which is not supported; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv', .*supported: 'gemm', 'marlin'"),
        ({"quant_method": "hqq"}, "quant_config=None"),
        (hqq_with(nbits=3), "nbits=3, which is not supported; supported: 1, 2, 4, 8"),
        (hqq_with(axis=0), "axis=0"),
        (hqq_with(view_as_float=True), "view_as_float=True"),
        (hqq_with(group_size="many"), "group_size='many', which is no number of weights"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"}, "packing_format='auto_round'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\], which is no pair"),
        (pack(num_bits=9), "num_bits=9"),
        (pack(type="float"), "type='float'"),
        (pack(strategy="block"), "strategy='block'"),
        (compressed("nvfp4-pack-quantized", {"num_bits": 8}), "num_bits=8"),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "group_size": 32}), "group_size=32, .*supported: 16"),
        (compressed("marlin-24", {"num_bits": 4}), "format='marlin-24'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "quant_type='int4'"),
        (compressed("int-quantized", {"num_bits": 4, "strategy": "channel"}), "num_bits=4"),
        (compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "token"}), "strategy='token'"),
        (compressed("int-quantized", {"num_bits": 8, "strategy": "block"}), "block_structure=None"),
        ({**pack(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "format='sparse-24-bitmask'"),
        ({**pack(), "transform_config": {"config_groups": {"R1": {}}}}, "config_groups="),
    ],
)
def test_what_is_not_supported_is_an_error_that_names_the_field(settings, message):
    with pytest.raises(ValueError, match=message):
        scheme(settings)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["gptq", "awq", "packed-4-bits-act-order", "fp8-block", "int8-asymmetric", "hqq"])
def test_dummy_weights_are_of_the_same_form(checkpoints, tmp_path, name):
    quantized, _ = write_quantized(checkpoints.path("qwen2"), tmp_path, {**FORMATS, **FURTHER}[name])
    bare = tmp_path / "bare"
    shutil.copytree(quantized, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    llm = make_llm(bare, load_format="dummy")
    model = runner_of(llm).model
    assert isinstance(model.layers[0].mixer.qkv.weight, QuantizedWeight)
    assert isinstance(model.lm_head.weight, DenseWeight)
    assert len(generate(llm, [[5, 6, 7]], GREEDY.clone(max_tokens=8))[0].outputs[0].token_ids) == 8


def test_the_engine_says_what_it_does_not_support(checkpoints, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(checkpoints.path("llama"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "quark"}}))
    with pytest.raises(ValueError, match="quark"):
        make_llm(path)
