"""A quantized checkpoint says what the dense one with the same weights says, as computed by transformers."""

from __future__ import annotations

import pytest
import torch

from quire.checkpoints.formats.scheme import QuantizedWeight
from quire.layers.linear import DenseWeight
from support.checkpoints import write_checkpoint
from support.engines import make_llm, runner_of, teacher_forced_logits
from support.quantized import FORMATS, FURTHER, write_quantized
from support.reference import load, logits, prompts

pytestmark = pytest.mark.texts

TEXT = prompts(300, 9)[8][:60]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_computes_with_exactly_the_weights_it_means(checkpoints, tmp_path, name):
    quantized, dense = write_quantized(checkpoints.path("llama-gqa4-llama3-old"), tmp_path, FORMATS[name])
    llm = make_llm(quantized)
    torch.testing.assert_close(teacher_forced_logits(llm, TEXT), logits(load(dense), TEXT), rtol=1e-4, atol=2e-4)
    layer = runner_of(llm).model.layers[0]
    assert isinstance(layer.mixer.qkv.weight, QuantizedWeight)
    assert isinstance(runner_of(llm).model.lm_head.weight, DenseWeight)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Layers whose outputs are multiples of 64."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("wide"), "llama", sizes)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FURTHER)
def test_so_does_one_in_a_further_format(wide, tmp_path, name):
    quantized, dense = write_quantized(wide, tmp_path, FURTHER[name])
    llm = make_llm(quantized)
    torch.testing.assert_close(teacher_forced_logits(llm, TEXT), logits(load(dense), TEXT), rtol=1e-4, atol=2e-4)
    assert isinstance(runner_of(llm).model.layers[0].mixer.qkv.weight, QuantizedWeight)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", ["gptq", "fp8-block", "awq", "int8-channel"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2", "phi3"])
def test_so_do_those_of_other_families(tmp_path, name, family):
    """Experts, biases, projections that are fused in the checkpoint."""
    sizes = {"moe_intermediate_size": 32, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2}
    source = write_checkpoint(tmp_path / "source", family, sizes)
    quantized, dense = write_quantized(source, tmp_path, FORMATS[name])
    llm = make_llm(quantized)
    torch.testing.assert_close(teacher_forced_logits(llm, TEXT), logits(load(dense), TEXT), rtol=1e-4, atol=2e-4)
    layer = runner_of(llm).model.layers[0]
    assert isinstance(layer.mixer.qkv.weight, QuantizedWeight)
    if family in ("qwen3_moe", "mixtral"):
        assert all(isinstance(weight, QuantizedWeight) for weight in layer.mlp.gate_up.weights + layer.mlp.down.weights)
        assert isinstance(layer.mlp.router.weight, DenseWeight)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gptq", "packed-8-bits-a-channel", "float8-block", "int8-asymmetric", "nvfp4", "nf4"])
def test_in_bfloat16_the_logits_are_near(checkpoints, tmp_path, name):
    quantized, dense = write_quantized(checkpoints.path("llama-gqa4-llama3-old"), tmp_path, FORMATS[name])
    made = teacher_forced_logits(make_llm(quantized, dtype="bfloat16"), TEXT)
    wanted = teacher_forced_logits(make_llm(dense, dtype="bfloat16"), TEXT)
    assert (made - wanted).abs().mean() < 0.08 * wanted.std()  # 0.06: integer products round activations to 8 bits
