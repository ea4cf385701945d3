"""Checkpoints in torch's own format, and under the names that the hub's older repositories use."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.checkpoints.errors import WeightError
from support.checkpoints import write_checkpoint
from support.engines import MAX_MODEL_LEN, make_llm, teacher_forced_logits

TEXT = list(range(20, 70))
BIN, WEIGHTS = "pytorch_model.bin", "model.safetensors"


def as_bin(path: Path, rename: Callable[[str], str] = lambda name: name) -> dict[str, Tensor]:
    """Replace the weight file by torch's form, under other names."""
    tensors = {rename(name): tensor for name, tensor in load_file(path / WEIGHTS).items()}
    torch.save(tensors, path / BIN)
    (path / WEIGHTS).unlink()
    return tensors


def same_model(path: Path, original: Path) -> None:
    expected = teacher_forced_logits(make_llm(original), TEXT)
    assert torch.equal(teacher_forced_logits(make_llm(path), TEXT), expected)


@pytest.fixture
def copy(checkpoints, tmp_path):
    return lambda variant: Path(shutil.copytree(checkpoints.path(variant), tmp_path / "copy"))


@pytest.mark.parametrize("variant", ["llama", "gpt2", "gpt_oss"])
def test_a_torch_file_is_the_same_model(checkpoints, copy, variant):
    path = copy(variant)
    as_bin(path)
    same_model(path, checkpoints.path(variant))


def test_several_torch_files_with_an_index_are_the_same_model(checkpoints, copy):
    path = copy("llama")
    tensors = as_bin(path)
    (path / BIN).unlink()
    shards: list[dict[str, Tensor]] = [{}, {}, {}]
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        shards[i % 3][name] = tensor
        weight_map[name] = f"pytorch_model-{i % 3 + 1:05}-of-00003.bin"
    for i, shard in enumerate(shards):
        torch.save(shard, path / f"pytorch_model-{i + 1:05}-of-00003.bin")
    (path / f"{BIN}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    same_model(path, checkpoints.path("llama"))


def test_safetensors_are_preferred(copy):
    path = copy("llama")
    (path / BIN).write_bytes(b"not read")
    make_llm(path)


def test_a_file_that_would_run_code_is_refused_and_nothing_runs(copy, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "hacked"),)

    path = copy("llama")
    tensors = as_bin(path)
    torch.save({**tensors, "attack": Attack()}, path / BIN)
    with pytest.raises(WeightError, match=r"pytorch_model.bin cannot be read safely"):
        make_llm(path)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("content", [b"", b"<html>", b"PK\3\4 cut off"])
def test_a_file_that_is_no_torch_file_is_named(copy, content):
    path = copy("llama")
    as_bin(path)
    (path / BIN).write_bytes(content)
    with pytest.raises(WeightError, match=r"pytorch_model.bin cannot be read"):
        make_llm(path)


def test_a_list_of_tensors_is_no_checkpoint(copy):
    path = copy("llama")
    as_bin(path)
    torch.save([torch.zeros(2)], path / BIN)
    with pytest.raises(WeightError, match="is no table of tensors"):
        make_llm(path)


def test_weights_saved_without_the_prefix_of_the_model_are_found(checkpoints, copy):
    """gpt2's own repository says wte.weight, and keeps the causal masks besides."""
    path = copy("gpt2")
    tensors = as_bin(path, lambda name: name.removeprefix("transformer."))
    assert "wte.weight" in tensors
    torch.save({**tensors, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, path / BIN)
    same_model(path, checkpoints.path("gpt2"))


def test_a_text_model_inside_a_larger_one_is_found(checkpoints, copy):
    """Gemma 3 as it is published from 4B on: text_config, language_model., and a part that sees."""
    path = copy("gemma3")
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(path / WEIGHTS).items()}
    save_file({**tensors, "vision_tower.x.weight": torch.zeros(2)}, path / WEIGHTS)
    config = json.loads((path / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (path / "config.json").write_text(json.dumps(whole))
    same_model(path, checkpoints.path("gemma3"))


def test_the_layout_of_opt_125m(tmp_path):
    """pytorch_model.bin without `model.`, the head beside the embedding it is tied to, vocab.json and merges.txt."""
    config = {"ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True}
    path = write_checkpoint(tmp_path / "new", "opt", config)
    old = Path(shutil.copytree(path, tmp_path / "old"))
    tensors = as_bin(old, lambda name: name.removeprefix("model."))
    tensors["lm_head.weight"] = tensors["decoder.embed_tokens.weight"]
    torch.save(tensors, old / BIN)
    bpe = json.loads((old / "tokenizer.json").read_text())["model"]
    (old / "vocab.json").write_text(json.dumps(bpe["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in bpe["merges"]]
    (old / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (old / "tokenizer.json").unlink()
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True}
    (old / "tokenizer_config.json").write_text(json.dumps(config))
    same_model(old, path)
    llm = make_llm(old)
    ids = llm.get_tokenizer().encode("Once upon a time")
    assert ids[0] == bpe["vocab"]["</s>"]
    assert llm.get_tokenizer().decode(ids, skip_special_tokens=True) == "Once upon a time"
    assert llm.generate("Once upon a time", use_tqdm=False)[0].prompt_token_ids == ids
    assert len(ids) < MAX_MODEL_LEN
