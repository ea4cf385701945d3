"""`quire doctor --model` shows what the engine then has, without its weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli.checks.engine_text import lines, ranges
from quire.config.engine import ConfigError, EngineConfig
from quire.engine.assemble import explain
from quire.engine.llm import LLM
from quire.engine.plan import limits_data
from quire.worker.plan import ForwardKind, RunnerKind
from support.engines import make_llm, runner_of
from support.gguf_files import write_gguf
from support.waiting import LONGEST

DEMO = "quire-demo"


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)


def check(llm: LLM) -> dict[str, Any]:
    """What is shown for the options of an engine is what the engine has."""
    shown = explain(llm.config)
    rank = shown["rank"]
    worker = llm.core.executor._worker  # type: ignore[attr-defined]
    runner = runner_of(llm)
    kv = llm.core.executor.kv_cache
    assert rank == json.loads(json.dumps(worker.plan.as_data()))
    assert shown["limits"] == limits_data(llm.core.scheduler.limits)
    assert shown["prefix_caching"] == llm.core.scheduler.kv.enable_prefix_caching
    assert type(runner.forward).__name__.removesuffix("Forward").lower() == {
        ForwardKind.EAGER: "",
        ForwardKind.DIVIDED: "context",
    }.get(rank["forward"], rank["forward"])
    assert rank["kernels"] == runner.model.kernels.chosen
    assert rank["block_size"] == kv.block_size == runner.batch.block_size
    drafter = 0 if worker.drafter is None else worker.drafter.entry_bytes
    assert rank["block_bytes"] + drafter == worker.kv_memory.blocks.shape[1] == kv.rank_bytes[0]
    assert [group["layers"] for group in rank["kv_groups"]] == [list(spec.layers) for spec in kv.specs]
    assert [group["backend"] for group in rank["kv_groups"]] == [b.name for b in runner.forward.backends]
    assert (shown["drafter"] is not None) == llm.core.scheduler.speculation.is_active
    return shown


@pytest.mark.parametrize(
    ("variant", "options", "kinds"),
    [
        ("llama", {}, ["FullAttention"]),
        ("llama", {"enforce_eager": True, "kv_cache_dtype": "int8"}, ["FullAttention"]),
        ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, ["FullAttention"]),
        ("llama", {"kv_offloading_size": 0.01, "enable_lora": True}, ["FullAttention"]),
        ("gemma3", {"max_num_batched_tokens": 64}, ["FullAttention", "SlidingWindow"]),
        ("deepseek_v3", {}, ["Latent"]),
        ("qwen3_next", {"mamba_block_size": None}, ["FullAttention", "State"]),
    ],
    ids=str,
)
def test_what_is_shown_is_what_the_engine_has(checkpoints, variant, options, kinds):
    shown = check(make_llm(checkpoints.path(variant), **options))
    assert sorted({group["kind"] for group in shown["rank"]["kv_groups"]}) == kinds
    text = "\n".join(lines(shown))
    for group in shown["rank"]["kv_groups"]:
        assert f"layers {ranges(group['layers'])}" in text
    assert all(f"{adjusted['option']} is {adjusted['used']}" in text for adjusted in shown["adjusted"])


def test_drafters_on_the_device_are_shown(checkpoints):
    path = checkpoints.path("llama")
    speculation = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 2}
    shown = check(make_llm(path, speculative_config=speculation))
    assert shown["drafter"]["on_device"]
    assert shown["rank"]["drafter_forward"] == ForwardKind.RECORDED
    assert f"draft_model by {path}, up to 2 drafts, on the device, recorded" in "\n".join(lines(shown))


def test_a_block_size_that_states_need_is_named_as_adjusted(checkpoints):
    shown = check(make_llm(checkpoints.path("mamba"), mamba_block_size=None))
    [changed] = [adjusted for adjusted in shown["adjusted"] if adjusted["option"] == "block_size"]
    assert changed["given"] == 16
    assert changed["used"] == shown["rank"]["block_size"] > 16


def test_a_gguf_file_is_shown_too(checkpoints, tmp_path):
    shown = check(make_llm(write_gguf(checkpoints.path("llama"), tmp_path / "model.gguf", "Q8_0")))
    assert shown["directory"].endswith("model.gguf")


def test_ranks_divide_the_heads(checkpoints):
    path = checkpoints.path("llama")
    alone, first = (
        explain(EngineConfig.create(model=str(path), tensor_parallel_size=ranks, max_model_len=128)) for ranks in (1, 2)
    )
    assert 2 * first["rank"]["block_bytes"] == alone["rank"]["block_bytes"]
    assert first["rank"]["kv_groups"][0]["heads"] * 2 == alone["rank"]["kv_groups"][0]["heads"]


def test_a_first_stage_of_a_pipeline_does_not_sample(checkpoints):
    config = EngineConfig.create(model=str(checkpoints.path("llama")), pipeline_parallel_size=2, max_model_len=128)
    assert explain(config)["rank"]["runner"] == RunnerKind.STAGE


def test_what_an_engine_would_refuse_is_an_error(checkpoints):
    path = str(checkpoints.path("llama"))
    with pytest.raises(ConfigError, match="max_model_len"):
        explain(EngineConfig.create(model=path, max_model_len=10**6))
    done = doctor("--model", path, "--max-model-len", "1000000")
    assert done.returncode == 1
    assert done.stderr.startswith("quire: error: ")
    assert "--max-model-len" in done.stderr
    assert not done.stdout


def test_no_weights_are_needed(checkpoints, tmp_path: Path):
    path = checkpoints.path("llama")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (path / name).exists():
            shutil.copy(path / name, tmp_path)
    options = "--model", str(tmp_path), "--max-model-len", "64", "--dtype", "float32"
    shown = json.loads(doctor(*options, "--json").stdout)
    assert shown["limits"]["max_model_len"] == 64
    assert shown["rank"]["dtype"] == "float32"
    done = doctor(*options)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines() == list(lines(shown))


def test_options_without_a_model_are_an_error():
    done = doctor("--max-model-len", "64")
    assert done.returncode == 1
    assert "--max-model-len is for an engine; give its --model, too" in done.stderr


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3], "1, 3")])
def test_ranges_of_layers_are_short(numbers, text):
    assert ranges(numbers) == text
