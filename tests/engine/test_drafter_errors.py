"""A drafter that does not fit is an error in one line, before the engine starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from support.checkpoints import Checkpoints
from support.drafters import Drafters
from support.layouts import edit_tensors


@pytest.fixture(scope="module")
def drafters(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(checkpoints, tmp_path_factory)


def error_of(target: Path, speculation: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What a user sees on the terminal."""
    options = ["--dtype", "float32", "--max-model-len", "64", "--num-gpu-blocks-override", "20"]
    line = ["generate", "hi", "--model", str(target), *options, "--speculative-config", json.dumps(speculation)]
    assert main(line) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    [error] = [line for line in printed.err.splitlines() if "error" in line.lower()]
    assert error.startswith("quire: error: ")
    return error


def changed(path: Path, into: Path, **fields: Any) -> str:
    """A copy of a checkpoint whose config.json has other fields, or lacks those that are None."""
    shutil.copytree(path, into, dirs_exist_ok=True)
    config = json.loads((into / "config.json").read_text()) | fields
    kept = {name: value for name, value in config.items() if name not in fields or value is not None}
    (into / "config.json").write_text(json.dumps(kept))
    return str(into)


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa", None])
def test_a_missing_directory(checkpoints: Checkpoints, method, capsys):
    given = {"method": method, "model": "/nowhere/head", "num_speculative_tokens": 2}
    given = {name: value for name, value in given.items() if value is not None}
    error = error_of(checkpoints.path("llama"), given, capsys)
    assert "'/nowhere/head': no such file or directory" in error


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa", "mlp_speculator"])
def test_an_empty_directory(checkpoints: Checkpoints, tmp_path, method, capsys):
    given = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    assert str(tmp_path) in error_of(checkpoints.path("llama"), given, capsys)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "mlp_speculator"])
def test_a_gguf_file_as_a_head(checkpoints: Checkpoints, tmp_path, method, capsys):
    path = tmp_path / "head.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    given = {"method": method, "model": str(path), "num_speculative_tokens": 2}
    assert "gguf" in error_of(checkpoints.path("llama"), given, capsys).lower()


def test_a_draft_model_of_a_larger_vocabulary(checkpoints: Checkpoints, capsys):
    given = {"method": "draft_model", "model": str(checkpoints.path("qwen2-windows-old")), "num_speculative_tokens": 2}
    error = error_of(checkpoints.path("llama"), given, capsys)
    assert "the draft model has 401 tokens, but the model has only 320" in error


def test_parallel_drafting_without_a_mask(checkpoints: Checkpoints, capsys):
    given = {"method": "draft_model", "model": str(checkpoints.path("llama")), "num_speculative_tokens": 2}
    assert "pard_token" in error_of(checkpoints.path("llama"), {**given, "parallel_drafting": True}, capsys)


@pytest.mark.parametrize(
    ("kind", "field", "wrong", "words"),
    [
        ("eagle", "hidden_size", 48, "hidden_size=48, but its target model has 64"),
        ("eagle3", "target_hidden_size", 48, "target_hidden_size=48, but its target has 64"),
        ("eagle3", "draft_vocab_size", 999, "draft_vocab_size=999, but its target has 320"),
        ("mlp_speculator", "emb_dim", 48, "emb_dim 48, but the model has 64"),
        ("mlp_speculator", "vocab_size", 99, "vocab_size 99, but the model has 320"),
        ("eagle", "intermediate_size", 97, "shape"),
        ("eagle3", "rms_norm_eps", None, "rms_norm_eps"),
    ],
)
def test_a_head_of_another_model(drafters: Drafters, tmp_path, kind, field, wrong, words, capsys):
    config = drafters.config(kind, "llama")
    model = changed(Path(config["model"]), tmp_path, **{field: wrong})
    assert words in error_of(drafters.target("llama"), {**config, "model": model}, capsys)


@pytest.mark.parametrize(("kind", "level"), [("eagle", None), ("eagle3", None), ("eagle3", "transformer_layer_config")])
def test_a_field_without_a_value(drafters: Drafters, tmp_path, kind, level, capsys):
    """null says as little as no field at all. Heads of the library speculators have their layers on a level below."""
    config = drafters.config(kind, "llama")
    shutil.copytree(config["model"], tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"rms_norm_eps": None}
    (tmp_path / "config.json").write_text(json.dumps(fields if level is None else {level: fields}))
    error = error_of(drafters.target("llama"), {**config, "model": str(tmp_path)}, capsys)
    assert f"config.json of the {kind} head has no value of 'rms_norm_eps'" in error


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "mlp_speculator", "similar"])
def test_a_checkpoint_that_lacks_a_tensor(drafters: Drafters, tmp_path, kind, capsys):
    config = drafters.config(kind, "llama")
    model = changed(Path(config["model"]), tmp_path)
    last = {"medusa": "2.1.weight", "mlp_speculator": "speculator.ln.2.bias", "similar": "model.norm.weight"}
    name = last.get(kind, "fc.weight")
    edit_tensors(tmp_path, lambda tensors, config: {n: t for n, t in tensors.items() if n != name})
    error = error_of(drafters.target("llama"), {**config, "model": model}, capsys)
    assert name in error


def test_multi_token_prediction_of_a_model_without_it(drafters: Drafters, tmp_path, capsys):
    given = {"method": "mtp", "num_speculative_tokens": 2}
    error = error_of(drafters.target("llama"), given, capsys)
    assert "LlamaForCausalLM has no multi-token prediction" in error
    shutil.copytree(drafters.target("glm4_moe"), tmp_path, dirs_exist_ok=True)
    edit_tensors(tmp_path, lambda tensors, config: {n: t for n, t in tensors.items() if "layers.3." not in n})
    assert "no layer for multi-token prediction" in error_of(tmp_path, given, capsys)
