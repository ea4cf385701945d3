"""Adapters of a quantized model do what they do to the dequantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints.hub import bundled_model
from quire.engine.llm import LLM
from quire.layers.lora import LowRank
from quire.lora import LoRARequest
from quire.messages.sampling_params import SamplingParams
from support.adapters import deltas, modules_of, write_adapter
from support.engines import runner_of

TEXT = (Path(__file__).parents[1] / "data" / "demo_eval" / "heldout.txt").read_text()[:6000]


def best_tokens(llm: LLM, adapter: LoRARequest | None = None) -> list[int]:
    """The likeliest token at each position of the text."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    token_ids = llm.get_tokenizer().encode(TEXT)
    size = llm.max_model_len - 1
    parts = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    outputs = llm.generate(parts, params, use_tqdm=False, lora_request=adapter)
    places = [place for output in outputs for place in output.prompt_logprobs[1:]]
    return [max(place, key=lambda token: place[token].logprob) for place in places]


def dequantized(llm: LLM, directory: Path, adapter: Path) -> Path:
    """A checkpoint of the engine's dequantized weights with the adapter merged in float32."""
    shutil.copytree(bundled_model(), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    model, added = runner_of(llm).model, deltas(adapter)
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    table = model.embedding.table
    tensors["model.embed_tokens.weight"] = table.rows(torch.arange(model.vocab_size)).float()
    layers = [w for layer in model.layers for w in (layer.mixer.qkv, layer.mixer.out, layer.mlp.up, layer.mlp.down)]
    for linear in (*layers, model.lm_head):
        assert isinstance(linear.adapters, LowRank)
        dense, start = linear.weight.dense().float(), 0
        for part in linear.adapters.shapes[0].parts:
            assert part.stop - part.start == part.rows
            tensors[f"{part.name}.weight"] = dense[start : start + part.rows] + added.get(part.name, 0)
            start += part.rows
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ("int4", "float32"),
        *(pytest.param("int8", dtype, marks=pytest.mark.sampled(4)) for dtype in ("float32", "bfloat16")),
    ],
)
def test_teacher_forced_tokens_are_those_of_the_dequantized_model(tmp_path, quantization, dtype):
    llm = LLM(dtype=dtype, quantization=quantization, enable_lora=True, max_num_seqs=4)
    adapter = write_adapter(tmp_path / "a", modules_of(llm, embedding=False), rank=16)
    made = best_tokens(llm, LoRARequest("a", 1, str(adapter)))
    expected = best_tokens(LLM(dequantized(llm, tmp_path / "merged", adapter), dtype="float32", max_num_seqs=4))
    without = best_tokens(llm)
    agree = sum(a == b for a, b in zip(made, expected, strict=True)) / len(made)
    changed = sum(a != b for a, b in zip(made, without, strict=True)) / len(made)
    print(f"{len(made)} positions, {agree:.4f} agree, the adapter changes {changed:.3f}")
    assert len(made) > 1000
    assert changed > 0.05
    assert agree >= 0.99
