"""Profiles of one rank and of several: what the traces show, which steps they have, and what goes wrong."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import ConfigError
from quire.config.profiler import ProfilerConfig as Options
from quire.engine.core import EngineDeadError
from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from quire.observability.profiling import ProfilerConfig
from support.checkpoints import Checkpoints
from support.engines import make_llm

LLAMA = "llama-gqa2-tied-llama3"
PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}
FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
STATIONS = ("schedule", "prepare", "forward", "sample", "output")


def start_llm(path: Path, folder: Path, fields: dict[str, Any] | None = None, **options: Any) -> LLM:
    config = {"profiler": "torch", "torch_profiler_dir": str(folder), **(fields or {})}
    return make_llm(path, profiler_config=config, **options)


def run(llm: LLM, params: SamplingParams = FIVE) -> list[int]:
    return list(llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids)


def ranges(file: Path) -> Counter[str]:
    """How often each named range is in a trace; steps are counted together."""
    data = file.read_bytes()
    events = json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)["traceEvents"]
    names = (event["name"] for event in events if event.get("cat") == "user_annotation")
    return Counter("step" if name.startswith("step ") else name for name in names)


def traces(folder: Path) -> dict[str, Counter[str]]:
    """By the end of the name, such as "rank0"."""
    assert not [file for file in folder.iterdir() if file.name.startswith(".")], "a part was left behind"
    return {file.name.split(".")[0].rpartition("-")[2]: ranges(file) for file in folder.iterdir()}


@pytest.fixture
def path(checkpoints: Checkpoints) -> Path:
    return checkpoints.path(LLAMA)


def test_a_trace_shows_the_stations_of_each_step_and_the_same_answer(path, tmp_path):
    llm = start_llm(path, tmp_path / "new" / "folder", {"torch_profiler_use_gzip": False})
    expected = run(llm)
    llm.start_profile("mine")
    assert run(llm) == expected
    llm.stop_profile()
    [file] = (tmp_path / "new" / "folder").iterdir()
    assert file.name.startswith("mine-")
    assert file.name.endswith("-replica0-rank0.pt.trace.json")
    seen = ranges(file)
    assert {name: seen[name] for name in ("step", *STATIONS)} == dict.fromkeys(("step", *STATIONS), 5)
    for owner in (llm.core.scheduler, llm.core.executor._worker.runner):  # nothing is left on the step path
        assert not {"schedule", "update", "submit", "sample"} & vars(owner).keys()
    assert run(llm) == expected


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_record_the_steps_that_the_plan_names(path, tmp_path, sizes):
    fields = {"delay_iterations": 1, "max_iterations": 2, "torch_profiler_with_stack": False}
    llm = start_llm(path, tmp_path, fields, **sizes)
    try:
        for _ in range(2):
            llm.start_profile()
            run(llm)
            seen = traces(tmp_path)  # they are written when the steps have been run
            llm.stop_profile()
            assert seen.keys() == {"core", "rank0", "rank1"}
            assert seen["core"]["output"] == 2
            for rank in ("rank0", "rank1"):
                assert (seen[rank]["step"], seen[rank]["prepare"], seen[rank]["forward"]) == (2, 2, 2)
            for file in tmp_path.iterdir():
                file.unlink()
    finally:
        llm.shutdown()


def test_steps_of_a_warm_up_are_dropped(path, tmp_path):
    fields = {"wait_iterations": 1, "warmup_iterations": 1, "active_iterations": 2}
    llm = start_llm(path, tmp_path, fields)
    llm.start_profile()
    run(llm)
    llm.stop_profile()
    assert traces(tmp_path)["rank0"]["step"] == 2


def test_a_profile_is_started_once_and_stopped_once(path, tmp_path):
    llm = start_llm(path, tmp_path, {"delay_iterations": 50})
    with pytest.raises(ValueError, match="no profile runs; start one first"):
        llm.stop_profile()
    llm.start_profile()
    with pytest.raises(ValueError, match="a profile runs already; stop it first"):
        llm.start_profile()
    run(llm)
    with pytest.raises(ValueError, match=r"nothing was recorded: there were 5 steps, .* starts with step 51"):
        llm.stop_profile()
    with pytest.raises(ValueError, match="no profile runs"):
        llm.stop_profile()
    assert not list(tmp_path.iterdir())


def test_two_profilers_do_not_record_the_same_process(path, tmp_path):
    llm = start_llm(path, tmp_path)
    with torch.profiler.profile(), pytest.raises(ValueError, match="another profiler of torch's"):
        llm.start_profile()
    llm.start_profile()
    run(llm)
    llm.stop_profile()
    assert traces(tmp_path)["rank0"]["step"] == 5


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_folder_that_cannot_be_written_is_an_error_and_nothing_is_recorded(path, tmp_path, ranks):
    (tmp_path / "file").write_text("")
    llm = start_llm(path, tmp_path / "file" / "folder", tensor_parallel_size=ranks)
    try:
        with pytest.raises(ValueError, match=r"torch_profiler_dir .*folder cannot be written: "):
            llm.start_profile()
        (tmp_path / "file").unlink()
        llm.start_profile()  # the failed one is forgotten
        run(llm)
        llm.stop_profile()
        assert traces(tmp_path / "file" / "folder")["rank0"]["step"] == 5
    finally:
        llm.shutdown()


def test_without_a_profiler_there_is_nothing_to_start(path):
    with pytest.raises(ValueError, match="no profiler is chosen; start the engine with profiler_config"):
        make_llm(path).start_profile()


def test_cudas_profiler_needs_a_gpu(path):
    llm = make_llm(path, profiler_config=ProfilerConfig(profiler="cuda"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="profiler 'cuda' needs a GPU"):
            llm.start_profile()


def test_a_prefix_cannot_lead_out_of_the_folder(path, tmp_path):
    with pytest.raises(ValueError, match="profile_prefix must consist of"):
        start_llm(path, tmp_path).start_profile("../elsewhere")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"profile": "torch"}, "profiler_config has no field 'profile'"),
        ({"profiler": "nsys", "torch_profiler_dir": "x"}, "profiler must be one of 'torch', 'cuda', got 'nsys'"),
        ({"profiler": "torch"}, "profiler 'torch' needs torch_profiler_dir"),
        ({"profiler": "cuda", "torch_profiler_dir": "x"}, "torch_profiler_dir needs profiler to be 'torch'"),
        ({"profiler": "torch", "torch_profiler_dir": "s3://bucket"}, "cannot be the address"),
        ({"profiler": "cuda", "delay_iterations": -1}, "delay_iterations must be at least 0, got -1"),
        ({"profiler": "cuda", "max_iterations": "3"}, "max_iterations must be of type int"),
        ({"profiler": "cuda", "active_iterations": 0}, "active_iterations must be at least 1"),
        ({"profiler": "cuda", "detailed_trace_annotation": True}, "detailed_trace_annotation is not supported by"),
    ],
)
def test_wrong_fields_are_errors_that_name_them(fields, problem):
    with pytest.raises(ConfigError, match=problem):
        LLM(profiler_config=fields)


@pytest.mark.parametrize(
    ("fields", "plan"),
    [
        ({}, [(0, "start")]),
        ({"delay_iterations": 3, "max_iterations": 2}, [(3, "start"), (5, "stop")]),
        ({"wait_iterations": 1, "warmup_iterations": 2}, [(1, "start"), (3, "start"), (8, "stop")]),
    ],
)
def test_the_plan_of_a_profile(fields, plan):
    assert Options.read({"profiler": "cuda", **fields}).plan == plan


@pytest.mark.nightly
def test_a_rank_that_is_lost_takes_the_profile_with_it(path, tmp_path):
    llm = start_llm(path, tmp_path, tensor_parallel_size=2)
    try:
        llm.start_profile()
        run(llm)
        llm.core.executor._ranks.groups[0].processes[1].kill()
        with pytest.raises((RuntimeError, EngineDeadError), match="rank 1 ended unexpectedly"):
            llm.stop_profile()
    finally:
        llm.shutdown()
