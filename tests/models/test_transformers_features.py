"""`--model-impl transformers` with adapters, quantization, pooling and tensor parallelism."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.engine.llm import LLM
from quire.models.transformers_backend.attention import Step
from quire.models.transformers_backend.linear import LinearLayers
from quire.models.transformers_backend.probe import LayerAttention
from quire.models.transformers_backend.stages import cut
from quire.ops import Kernels, Target
from quire.parallel.mesh import Communicator
from quire.parallel.pipeline import Stage
from support.adapters import OPTIONS, adapted_tokens, certain_tokens, check, merged, modules_of, write_adapter
from support.checkpoints import write_checkpoint
from support.engines import generate, make_llm, runner_of, teacher_forced_logits, tokens_of
from support.families.base import GLOBAL, LOCAL
from support.quantized import FORMATS, write_quantized
from support.reference import FEWER_PROMPTS, greedy, load, logits, prompts

MODELS: dict[str, dict[str, Any]] = {
    "helium": {"head_dim": 16, "num_attention_heads": 4},
    "vaultgemma": {
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "layer_types": [LOCAL, GLOBAL, LOCAL],
    },
    "phi3": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
}


@pytest.fixture(params=["helium", "vaultgemma"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", request.param, MODELS[request.param])


def engine(path: Path, **options: Any) -> LLM:
    return make_llm(path, model_impl="transformers", **options)


def test_adapters_in_one_batch_are_as_if_merged(path, tmp_path):
    llm = engine(path, max_num_batched_tokens=48, max_num_seqs=16, **OPTIONS)
    modules = modules_of(llm)
    assert len(modules) == 7 * 3 + ("lm_head" in modules)
    adapter = write_adapter(tmp_path / "adapter", modules, rank=8, seed=1)
    texts = prompts(300, 6)
    adapters = [(adapter, None)[i % 2] for i in range(len(texts))]
    wanted: list[list[int]] = [[]] * len(texts)
    wanted[::2] = certain_tokens(engine(merged(path, adapter, tmp_path / "merged")), texts[::2])
    wanted[1::2] = certain_tokens(engine(path), texts[1::2])
    for _ in range(2):
        check(adapted_tokens(llm, texts, adapters), wanted)


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow), "fp8"])
def test_quantized_weights_give_the_logits_of_what_they_mean(path, tmp_path, quantization):
    llm = engine(path, quantization=quantization)
    model = runner_of(llm).model
    tensors = load_file(path / "model.safetensors")
    for name, layer in model.linear_layers.items():
        before = tensors.get(f"{name}.weight", tensors["model.embed_tokens.weight"])
        tensors[f"{name}.weight"] = layer.weight.dense().contiguous()
        assert not torch.equal(before, tensors[f"{name}.weight"])
    shutil.copytree(path, tmp_path / "dense")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "dense/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, tmp_path / "dense/model.safetensors", {"format": "pt"})
    [text] = prompts(320, 1)[-1:]
    expected = logits(load(tmp_path / "dense"), text)
    difference = (teacher_forced_logits(llm, text, [len(text)]) - expected).abs().max()
    assert difference / expected.std() < 1e-3


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["gptq", "awq", "packed-4-bits", "float8-channel", "nf4", "llm-int8"])
def test_a_quantized_checkpoint_runs_as_the_weights_that_it_means(tmp_path, name):
    sizes = {**MODELS["helium"], "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    source = write_checkpoint(tmp_path / "source", "helium", sizes)
    quantized, dense = write_quantized(source, tmp_path, FORMATS[name])
    [text] = prompts(320, 1)[-1:]
    llm = make_llm(quantized)
    assert llm.config.model.model_impl == "transformers"
    expected = logits(load(dense), text)
    difference = (teacher_forced_logits(llm, text, [len(text)]) - expected).abs().max()
    assert difference / expected.std() < 1e-3


def test_hidden_states_become_embeddings(path):
    llm = engine(path, runner="pooling")
    network = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    texts = prompts(300, 4)
    for text, output in zip(
        texts, llm.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False), strict=True
    ):
        hidden = network(torch.tensor([text])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=-1)
        assert torch.allclose(torch.tensor(output.outputs.embedding), expected, atol=1e-4)


def test_a_model_without_a_head_and_a_classifier_pool(tmp_path):
    config = transformers.HeliumConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_labels=3,
        pad_token_id=0,
    )
    source = write_checkpoint(tmp_path / "tokenizer", "helium", MODELS["helium"])
    for kind in (transformers.HeliumModel, transformers.HeliumForSequenceClassification):
        torch.manual_seed(0)
        network = kind(config).eval()
        folder = tmp_path / kind.__name__
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        network.save_pretrained(folder)
        llm = make_llm(folder)
        assert llm.config.model.model_impl == "transformers"
        [text] = prompts(300, 1)[:1]
        with torch.inference_mode():
            out = network(torch.tensor([text]))
        if kind is transformers.HeliumModel:
            expected = torch.nn.functional.normalize(out.last_hidden_state[0, -1], dim=-1)
            made = llm.embed([{"prompt_token_ids": text}], use_tqdm=False)[0].outputs.embedding
        else:
            expected = out.logits[0].softmax(-1)
            made = llm.classify([{"prompt_token_ids": text}], use_tqdm=False)[0].outputs.probs
        assert torch.allclose(torch.tensor(made), expected, atol=1e-4)


@pytest.mark.slow  # each starts two processes
@pytest.mark.parametrize(
    "name", ["helium", pytest.param("vaultgemma", marks=pytest.mark.nightly), "phi3", "granitemoe"]
)
def test_ranks_share_the_layers_of_the_plan(tmp_path, name):
    folder = write_checkpoint(tmp_path, name, MODELS[name])
    expected = greedy(load(folder), prompts(320, FEWER_PROMPTS))
    llm = engine(folder, tensor_parallel_size=2)
    for continuation, tokens in zip(expected, tokens_of(generate(llm, [c.prompt for c in expected])), strict=True):
        continuation.check(tokens)


@pytest.mark.slow  # it starts two processes
@pytest.mark.parametrize("name", ["helium", pytest.param("vaultgemma", marks=pytest.mark.nightly)])
def test_stages_have_the_layers_of_the_plan(tmp_path, name):
    """Also with adapters, which change layers of both stages."""
    folder = write_checkpoint(tmp_path / "model", name, MODELS[name])
    expected = greedy(load(folder), prompts(320, FEWER_PROMPTS))
    modules = modules_of(engine(folder, **OPTIONS))
    llm = engine(folder, pipeline_parallel_size=2, **OPTIONS)
    for continuation, tokens in zip(expected, tokens_of(generate(llm, [c.prompt for c in expected])), strict=True):
        continuation.check(tokens)
    adapter = write_adapter(tmp_path / "adapter", modules, rank=8, seed=1)
    texts = prompts(300, 2)
    wanted = certain_tokens(engine(merged(folder, adapter, tmp_path / "merged")), texts)
    check(adapted_tokens(llm, texts, [adapter] * len(texts)), wanted)


def test_a_model_that_scales_its_stream_cannot_be_cut(tmp_path):
    """Granite multiplies embeddings by a factor whenever its layers run."""
    network = load(write_checkpoint(tmp_path, "granite", {"embedding_multiplier": 2.0}))
    modules = [layer.self_attn for layer in network.model.layers]
    layers = [LayerAttention(module, 4, 2, 24, None) for module in modules]
    with pytest.raises(ValueError, match="it changes hidden states outside of its layers"):
        cut(network.model, layers, Stage(range(1)))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("helium", {"num_attention_heads": 3, "num_key_value_heads": 1}, "does not divide num_attention_heads=3"),
        ("helium", {"intermediate_size": 97}, "does not divide the 97 elements of model.layers.0.mlp.gate_proj"),
        ("persimmon", {}, "it has no plan for tensor parallelism"),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(tmp_path, name, config, message):
    write_checkpoint(tmp_path, name, {**MODELS.get(name, {}), **config})
    kernels = Kernels(Target(torch.device("cpu"), torch.float32))
    layers = LinearLayers(kernels, Communicator(0, 2), Step(), None, None)
    with pytest.raises(ValueError, match=message):
        layers.replace(load(tmp_path))
