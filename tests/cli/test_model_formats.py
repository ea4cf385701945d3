"""Formats, sizes and times, as `quire list` and `quire show` say them."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from quire.checkpoints.format_names import format_of, quantization_of
from quire.cli.models.words import age_text, count_text, size_text, speed_text
from support.quantized import FORMATS, FURTHER
from support.waiting import LONGEST

SAFETENSORS = ["config.json", "model.safetensors"]
INT4 = {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("gptq", "GPTQ 4-bit"),
        ("gptq-8-bits-a-channel", "GPTQ 8-bit"),
        ("awq", "AWQ 4-bit"),
        ("packed-4-bits", "compressed-tensors 4-bit"),
        ("int8-channel", "compressed-tensors 8-bit"),
        ("float8-block", "compressed-tensors FP8"),
        ("fp8", "FP8"),
        ("marlin", "Marlin 4-bit"),
        ("hqq-8-bits", "HQQ 8-bit"),
    ],
)
def test_quantized_formats_have_names(form, name):
    config = {"quantization_config": {**FORMATS, **FURTHER}[form].config, "torch_dtype": "bfloat16"}
    assert quantization_of(config) == format_of(config, SAFETENSORS) == name


@pytest.mark.parametrize(
    ("config", "names", "format"),
    [
        ({"torch_dtype": "bfloat16"}, SAFETENSORS, "safetensors BF16"),
        ({"dtype": "float32"}, SAFETENSORS, "safetensors F32"),
        ({"text_config": {"dtype": "float16"}}, SAFETENSORS, "safetensors F16"),
        ({}, SAFETENSORS, "safetensors"),
        ({"torch_dtype": "float16"}, ["pytorch_model-00001-of-00002.bin"], "pytorch F16"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, SAFETENSORS, "MXFP4"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, SAFETENSORS, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "torchao", "quant_type": INT4}}, SAFETENSORS, "torchao 4-bit"),
        ({"quantization_config": {"quant_method": "torchao", "quant_type": "odd"}}, SAFETENSORS, "torchao"),
        ({}, ["a-Q4_K_M.gguf"], "GGUF Q4_K_M"),
        ({}, ["a.q8_0-00001-of-00002.gguf", "a.q8_0-00002-of-00002.gguf"], "GGUF Q8_0"),
        ({}, ["a-Q4_K_M.gguf", "a-Q8_0.gguf"], "GGUF Q4_K_M, Q8_0"),
        ({}, ["README.md", "config.json"], "no weights"),
        ({"dtype": ["odd"], "quantization_config": "odd", "text_config": 5}, SAFETENSORS, "safetensors"),
        ({"quantization_config": {"config_groups": {"a": 5}}}, SAFETENSORS, "compressed-tensors"),
    ],
)
def test_formats_have_names(config, names, format):
    assert format_of(config, names) == format


def test_numbers_are_rounded_for_people():
    assert [size_text(n) for n in (0, 999, 1_000, 999_600, 1_503_300_328, 16_380_000_000, 1.3e12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "1.0 MB",
        "1.5 GB",
        "16 GB",
        "1.3 TB",
    ]
    assert [count_text(n) for n in (12, 596_049_920, 8_190_735_360)] == ["12", "596 million", "8.2 billion"]
    assert [speed_text(n) for n in (0.534, 3.26, 23.7, 1_834.0)] == ["0.53", "3.3", "24", "1,800"]


def test_ages_are_told_in_the_largest_unit():
    ages = {0: "just now", 90: "1 minute ago", 7_300: "2 hours ago", 86_500: "1 day ago", 40 * 86_400: "1 month ago"}
    assert {seconds: age_text(time.time() - seconds) for seconds in ages} == ages
    assert age_text(time.time() + 60) == "just now"  # another machine's clock


def test_models_are_listed_and_shown_without_torch():
    code = "import sys; from quire.cli.main import main; main(['list']), main(['show']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0
    assert done.stdout.endswith("False\n")
