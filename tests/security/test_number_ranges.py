"""A data type that a model's numbers exceed is an error that names dtype, and never generated text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.checkpoints.hub import bundled_model
from quire.config.engine import ConfigError, EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from quire.models.description import describe
from quire.worker.warm_up import warm_up
from support.checkpoints import Checkpoints
from support.engines import run_and_leave_no_core, runner_of

_ONE = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def large_numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with hidden states beyond the range of float16, and within that of bfloat16."""
    return _with_large_numbers(bundled_model(), tmp_path_factory.mktemp("large") / "model")


def _with_large_numbers(checkpoint: Path, folder: Path) -> Path:
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() * 1e6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _description_with(tmp_path: Path, dtype: str, **fields: Any) -> Any:
    config = json.loads((bundled_model() / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    return describe(tmp_path, EngineConfig.create(model=str(tmp_path), dtype=dtype).model)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM"])
def test_families_that_overflow_in_float16_are_refused_at_start(tmp_path: Path, name: str) -> None:
    for dtype in ("float16", "half"):
        with pytest.raises(ConfigError, match=f"dtype='{dtype}' overflows in {name}.* use bfloat16 or float32"):
            _description_with(tmp_path, dtype, architectures=[name])
    for dtype in ("auto", "float32"):
        assert _description_with(tmp_path, dtype, architectures=[name]).max_model_len


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "GemmaForCausalLM"])
def test_other_families_take_float16(tmp_path: Path, name: str) -> None:
    assert _description_with(tmp_path, "float16", architectures=[name]).max_model_len


def _check_refusal(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # the engine goes on, and the next step is checked as well
        caplog.clear()
        [output] = llm.generate(["Hello"], _ONE, use_tqdm=False)
        assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("error", "")
        assert "Request" in caplog.messages[-1]
        assert "failed: dtype: in float16, the model computes NaN or infinity" in caplog.messages[-1]


def test_infinite_logits_are_an_error_that_names_dtype(large_numbers: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(large_numbers, dtype="float16", max_model_len=64, max_num_seqs=4)
    _check_refusal(llm, caplog)
    assert not runner_of(llm).was_finite


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_gpu_checks_its_numbers_when_it_starts(large_numbers: Path, dtype: str) -> None:
    runner = runner_of(LLM(large_numbers, dtype=dtype, max_model_len=64, max_num_seqs=4))
    runner.device.is_async = True  # a later step would not be checked, since the host waits for none
    with pytest.raises(ConfigError, match="dtype: in float16") if dtype == "float16" else contextlib.nullcontext():
        warm_up(runner, 4)


def test_finite_logits_are_checked_once(large_numbers: Path) -> None:
    llm = LLM(large_numbers, dtype="float32", max_model_len=64, max_num_seqs=4)
    assert not runner_of(llm).was_finite
    assert len(llm.generate(["Hello"], _ONE, use_tqdm=False)[0].outputs[0].token_ids) == 2
    assert runner_of(llm).was_finite


@pytest.mark.slow
@pytest.mark.parametrize("option", ["tensor", "pipeline", "prefill_context"])
def test_several_ranks_refuse_as_one_does(large_numbers: Path, caplog: pytest.LogCaptureFixture, option: str) -> None:
    llm = LLM(large_numbers, dtype="float16", max_model_len=64, max_num_seqs=4, **{f"{option}_parallel_size": 2})
    _check_refusal(llm, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("shares_experts", [False, True])
def test_several_replicas_refuse_as_one_does(checkpoints: Checkpoints, tmp_path: Path, shares_experts: bool) -> None:
    folder = _with_large_numbers(checkpoints.path("mixtral"), tmp_path / "model")

    async def finish(llm: AsyncLLM, name: str) -> tuple[str | None, str]:
        async for output in llm.generate({"prompt_token_ids": [5, 7, 9]}, _ONE, name):
            last = output.outputs[0]
        return last.finish_reason, str(last.stop_reason)

    async def check() -> None:
        options = {"dtype": "float16", "max_model_len": 64, "max_num_seqs": 4, "data_parallel_size": 2}
        llm = AsyncLLM(folder, **options, enable_expert_parallel=shares_experts)
        try:
            await llm.start()
            for turn in range(2):
                for reason, error in await asyncio.gather(*(finish(llm, f"{turn}-{i}") for i in range(4))):
                    assert (reason, error[:18]) == ("error", "dtype: in float16,")
        finally:
            await llm.shutdown()

    run_and_leave_no_core(check())
