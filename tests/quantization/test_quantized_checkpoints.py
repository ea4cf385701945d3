"""A quantized checkpoint says what the dense one with the same weights says, as computed by transformers."""

from __future__ import annotations

import pytest
import torch

from quire.config import EngineConfig
from quire.layers.linear import DenseWeight
from quire.parallel.mesh import Mesh
from quire.quantization.scheme import QuantizedWeight
from quire.worker.worker import Worker
from support.checkpoints import write_checkpoint
from support.engines import MAX_MODEL_LEN, forced_logits, make_llm, runner_of, teacher_forced_logits
from support.quantized import FORMATS, FP8, awq, float8, write_quantized
from support.reference import load, logits, prompts
from support.thread_group import ThreadGroup, on_every_rank

pytestmark = pytest.mark.texts

TEXT = prompts(300, 9)[8][:60]
SPLIT = {  # in groups of 16 inputs at most: half of what down projections have is no multiple of 32
    name: FORMATS[name]
    for name in ("gptq-symmetric", "packed-4-bits-asymmetric", "int8-channel", "int8-asymmetric", "float8-block", "fp8")
} | {"awq": awq(16), "fp8-block": float8("24x16", {**FP8, "weight_block_size": [24, 16]}, "weight_scale_inv")}


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_computes_with_exactly_the_weights_it_means(checkpoints, tmp_path, name):
    quantized, dense = write_quantized(checkpoints.path("llama-gqa4-llama3-old"), tmp_path, FORMATS[name])
    llm = make_llm(quantized)
    torch.testing.assert_close(teacher_forced_logits(llm, TEXT), logits(load(dense), TEXT), rtol=1e-4, atol=2e-4)
    layer = runner_of(llm).model.layers[0]
    assert isinstance(layer.mixer.qkv.weight, QuantizedWeight)
    assert isinstance(runner_of(llm).model.lm_head.weight, DenseWeight)


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


@pytest.mark.parametrize("name", ["gptq", "packed-8-bits-a-channel", "float8-block", "int8-asymmetric"])
def test_in_bfloat16_the_logits_are_near(checkpoints, tmp_path, name):
    quantized, dense = write_quantized(checkpoints.path("llama-gqa4-llama3-old"), tmp_path, FORMATS[name])
    made = teacher_forced_logits(make_llm(quantized, dtype="bfloat16"), TEXT)
    wanted = teacher_forced_logits(make_llm(dense, dtype="bfloat16"), TEXT)
    assert (made - wanted).abs().mean() < 0.08 * wanted.std()  # 0.06: integer products round activations to 8 bits


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_say_what_one_does(tmp_path, name, family):
    """Rows of q, k and v, of gate and up; whole groups of the inputs of o and down; experts."""
    sizes = {"head_dim": 32, "num_key_value_heads": 1}  # both ranks keep the same KV head
    sizes |= {"moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    source = write_checkpoint(tmp_path / "source", family, sizes)
    quantized, dense = write_quantized(source, tmp_path, SPLIT[name])
    config = EngineConfig.create(model=str(quantized), dtype="float32", max_num_seqs=4)
    workers = on_every_rank(2, lambda group: Worker(config, quantized, MAX_MODEL_LEN, Mesh(group.rank, tp=group)))
    made = on_every_rank(2, lambda group: forced_logits(workers[group.rank].runner, TEXT))
    assert torch.equal(made[0], made[1])
    torch.testing.assert_close(made[0], logits(load(dense), TEXT), rtol=1e-4, atol=2e-4)


def test_ranks_that_would_cut_groups_are_an_error(checkpoints, tmp_path):
    quantized, _ = write_quantized(checkpoints.path("llama"), tmp_path, FORMATS["gptq"])  # 96 inputs in groups of 32
    config = EngineConfig.create(model=str(quantized), dtype="float32", max_num_seqs=4)
    with pytest.raises(ValueError, match=r"down_proj: inputs 48 to 96 of 96.*groups of 32; .*tensor_parallel_size"):
        Worker(config, quantized, MAX_MODEL_LEN, Mesh(1, tp=ThreadGroup(1, 2)))
