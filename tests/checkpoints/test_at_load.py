"""--quantization int8, int4 and fp8: dense weights quantized when they are loaded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.checkpoints.formats.scheme import QuantizedWeight
from quire.config.engine import ConfigError
from quire.layers.experts import SeparateExperts
from quire.layers.linear import DenseWeight
from quire.ops.reference.quantized import QuantizedMatrix
from support.checkpoints import write_checkpoint
from support.engines import generate, make_llm, runner_of, teacher_forced_logits, tokens_of
from support.gguf_files import write_gguf

pytestmark = pytest.mark.texts

HELD_OUT = Path(__file__).parents[1] / "data" / "demo_eval" / "heldout.txt"


def perplexity(llm: LLM, ids: list[int], length: int = 512) -> float:
    """Of the tokens after the first of each piece."""
    pieces = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    losses = []
    for output in llm.generate([{"prompt_token_ids": piece} for piece in pieces], params, use_tqdm=False):
        for token, logprobs in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]:
            losses.append(-logprobs[token].logprob)
    return math.exp(sum(losses) / len(losses))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("length", [4096, pytest.param(16384, marks=pytest.mark.slow)])
def test_perplexity_on_held_out_text_stays_what_it_was(length):
    """The bundled model's: int8 within 0.5 % of bfloat16's, int4 within 3 %."""
    measured = {}
    for option in (None, "int8", "int4"):
        llm = LLM(quantization=option, max_model_len=1024)
        ids = llm.get_tokenizer().encode(HELD_OUT.read_text(encoding="utf-8"))
        measured[option] = perplexity(llm, ids[:length])
    print(measured)
    assert measured["int8"] / measured[None] < 1.005
    assert measured["int4"] / measured[None] < 1.03


def weights_of(path: Path, **options):
    return runner_of(make_llm(path, **options)).model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["llama", "llama-gqa2-tied-llama3", "gpt2", "phi3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_dense_checkpoint_can_be_quantized(checkpoints, variant, dtype):
    """Fused, transposed, tied: each layer's weight is the rounded dense one."""
    path = checkpoints.path(variant)
    dense, int4 = weights_of(path, dtype=dtype), weights_of(path, dtype=dtype, quantization="int4")
    kernels = dense.kernels
    for plain, quantized in zip(dense.layers, int4.layers, strict=True):
        for a, b in ((plain.mixer.qkv, quantized.mixer.qkv), (plain.mlp.down, quantized.mlp.down)):
            assert isinstance(b.weight, QuantizedWeight)
            wanted = kernels.quantize(a.weight.dense(), 4, 128).dequantize()
            torch.testing.assert_close(b.weight.rows(torch.arange(7)), wanted[:7].to(b.weight.dtype))
    head, wanted = int4.lm_head.weight, kernels.quantize(dense.lm_head.weight.dense(), 8, 2**30).dequantize()
    torch.testing.assert_close(head.rows(torch.arange(9)), wanted[:9].to(head.dtype))
    if dense.spec.tie_embeddings:
        assert int4.embedding.table is head


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_are_quantized_and_routers_are_not(checkpoints, variant):
    path = checkpoints.path(variant)
    wanted = teacher_forced_logits(make_llm(path), [5, 6, 7, 8, 9])
    llm = make_llm(path, quantization="int8")
    made = teacher_forced_logits(llm, [5, 6, 7, 8, 9])
    assert 0 < (made - wanted).abs().mean() < 0.1 * wanted.std()
    mlp = runner_of(llm).model.layers[-1].mlp
    assert isinstance(mlp.gate_up, SeparateExperts)
    assert isinstance(mlp.down, SeparateExperts)
    assert isinstance(mlp.router.weight, DenseWeight)


def test_gguf_files_with_dense_tensors_are_quantized_too(checkpoints, tmp_path):
    path = write_gguf(checkpoints.path("llama-gqa2-tied-llama3"), tmp_path / "model.gguf", "BF16")
    model = weights_of(path, quantization="int8")
    (piece,) = model.layers[0].mixer.qkv.weight.pieces
    assert isinstance(piece, QuantizedMatrix)
    assert piece.bits == 8


def test_layers_that_the_checkpoint_has_quantized_stay_as_they_are(checkpoints, tmp_path):
    path = write_gguf(checkpoints.path("llama-gqa2-tied-llama3"), tmp_path / "model.gguf", "Q8_0")
    (piece,) = weights_of(path, quantization="int4").layers[0].mixer.qkv.weight.pieces
    assert (piece.bits, piece.group) == (8, 32)


def test_answers_do_not_depend_on_the_batch(checkpoints):
    """Not by a bit: integer products and packed ones sum up each row alone."""
    for option in (None, "int8", "int4"):
        llm = LLM(quantization=option, max_model_len=256)
        prompts = ["Once upon a time", "The", "A cat sat on the mat and looked at", "Why"]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        together = tokens_of(llm.generate(prompts, params, use_tqdm=False))
        alone = [tokens_of(llm.generate([p], params, use_tqdm=False))[0] for p in prompts]
        assert together == alone


def test_dummy_weights_are_quantized(tmp_path):
    llm = make_llm(write_checkpoint(tmp_path), load_format="dummy", quantization="int4")
    assert len(generate(llm, ["a"])[0].outputs[0].token_ids) == 64


@pytest.mark.parametrize("variant", ["llama-gqa2-tied-llama3", "qwen3_moe"])
def test_fp8_rounds_each_output_to_float8(checkpoints, variant):
    path = checkpoints.path(variant)
    dense, made = (weights_of(path, dtype="bfloat16", quantization=option) for option in (None, "fp8"))
    for plain, quantized in zip(dense.layers, made.layers, strict=True):
        wanted, got = (layer.mixer.qkv.weight.dense().float() for layer in (plain, quantized))
        assert isinstance(quantized.mixer.qkv.weight, QuantizedWeight)
        steps = wanted.abs().amax(1, keepdim=True) / 448  # of the scale; float8 has three bits behind the first
        assert not torch.equal(got, wanted)
        assert ((got - wanted).abs() <= wanted.abs() / 15 + steps).all()
        if variant == "qwen3_moe":
            assert isinstance(quantized.mlp.gate_up, SeparateExperts)


def test_fp8_generates_like_the_dense_model_and_keeps_the_format_of_an_fp8_checkpoint(checkpoints, tmp_path):
    path = checkpoints.path("llama")
    wanted = teacher_forced_logits(make_llm(path), [5, 6, 7, 8, 9])
    made = teacher_forced_logits(make_llm(path, quantization="fp8"), [5, 6, 7, 8, 9])
    assert 0 < (made - wanted).abs().mean() < 0.1 * wanted.std()
    gguf = write_gguf(path, tmp_path / "model.gguf", "BF16")
    with pytest.raises(ConfigError, match="quantized with 'gguf'"):
        make_llm(gguf, quantization="fp8")
