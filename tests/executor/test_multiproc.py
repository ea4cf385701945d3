"""Two ranks as processes of their own: results, faults, and what is left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.config.engine import ConfigError
from quire.engine.core import EngineDeadError
from quire.engine.llm import LLM
from quire.executor import rank
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput
from support.checkpoints import write_checkpoint
from support.engines import GREEDY, assert_nothing_is_left, core_request, finish, generate, make_llm, tokens_of
from support.faults import Faults
from support.waiting import LONGEST, eventually

pytestmark = pytest.mark.texts


def children() -> set[psutil.Process]:
    """Processes that this one started and that still run."""
    return {p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def wait_for_no_children_but(before: set[psutil.Process]) -> None:
    _, left = psutil.wait_procs(children() - before, timeout=LONGEST)
    assert not left, "a process was left behind"


def split_llm(path: Any, **options: Any) -> LLM:
    return make_llm(path, tensor_parallel_size=2, **options)


def process_of(llm: LLM, number: int) -> subprocess.Popen[bytes]:
    return llm.core.executor._ranks.groups[0].processes[number]


@pytest.fixture(scope="module")
def llm(checkpoints) -> Iterator[LLM]:
    """With two steps in flight, and with a plugin that is given as a class."""
    llm = split_llm(checkpoints.path("llama"), async_scheduling=True, logits_processors=[Faults])
    yield llm
    llm.shutdown()


@pytest.mark.plain("counts steps: the first two already end the request")
def test_no_rank_acknowledges_a_step_before_its_result(llm):
    """Two steps are submitted and sampled while a rank is stopped; their results come when it goes on, in order."""
    core = llm.core
    core.add_request(core_request(llm, "0", [5, 6, 7], GREEDY.clone(max_tokens=3)))
    process_of(llm, 1).send_signal(signal.SIGSTOP)
    results: list[Future[ModelRunnerOutput]] = []
    steps = []
    for _ in range(2):
        steps.append(core.scheduler.schedule())
        core.executor.submit(steps[-1])
        results.append(core.executor.sample(steps[-1].step_id))
    assert not any(result.done() for result in results)
    process_of(llm, 1).send_signal(signal.SIGCONT)
    outputs = [result.result(LONGEST) for result in results]
    assert [output.step_id for output in outputs] == [step.step_id for step in steps]
    token_ids = [token for output in outputs for token in output.sampled_token_ids[0]]
    for output in outputs:
        core.scheduler.update(output)
    token_ids += finish(core)["0"][0]
    whole = generate(make_llm(llm.config.model.model), [[5, 6, 7]], GREEDY.clone(max_tokens=3))
    assert [token_ids] == tokens_of(whole)
    assert_nothing_is_left(core)


def test_after_ctrl_c_the_ranks_go_on(llm, references):
    """A terminal sends it to all processes. It comes while the result of a step is awaited."""
    expected = references.continuations("llama")[:4]
    prompts = [c.prompt for c in expected]
    stopped, main = process_of(llm, 1), threading.main_thread()

    def waits() -> bool:
        """Whether the main thread waits for a result."""
        frame = sys._current_frames()[main.ident]
        return llm.core.has_unfinished and frame.f_code is threading.Condition.wait.__code__

    def interrupt() -> None:
        eventually(waits)
        for process in (*children(), psutil.Process()):
            process.send_signal(signal.SIGINT)
        stopped.send_signal(signal.SIGCONT)

    stopped.send_signal(signal.SIGSTOP)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY.clone(max_tokens=8), use_tqdm=False)
    assert_nothing_is_left(llm.core)
    for continuation, token_ids in zip(expected, tokens_of(generate(llm, prompts)), strict=True):
        continuation.check(token_ids)


@pytest.mark.slow
def test_ranks_with_nothing_to_do_stay(llm):
    """They hear heartbeats, without which they would end after some seconds."""
    time.sleep(rank.SILENCE_SECONDS + 3)
    assert generate(llm, [[5, 6, 7]])


@pytest.mark.slow
def test_a_stopped_rank_is_an_error_that_names_it(checkpoints):
    before = children()
    llm = split_llm(checkpoints.path("llama"))
    stream = llm.stream([5, 6, 7], GREEDY)
    next(stream)
    process_of(llm, 1).send_signal(signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="the engine failed: rank 1 has been silent for 5 s"):
        for _ in stream:
            pass
    llm.shutdown()
    wait_for_no_children_but(before)


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_that_names_it_and_nothing_hangs(checkpoints):
    before = children()
    llm = split_llm(checkpoints.path("llama"))
    stream = llm.stream([5, 6, 7], GREEDY)
    next(stream)
    process_of(llm, 1).kill()
    with pytest.raises(EngineDeadError, match="the engine failed: the process of rank 1 ended unexpectedly"):
        for _ in stream:
            pass
    with pytest.raises(EngineDeadError, match="the process of rank 1 ended unexpectedly"):
        llm.core.check()  # which an idle core does now and then
    with pytest.raises(EngineDeadError, match="the process of rank 1 ended unexpectedly"):
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    llm.shutdown()
    wait_for_no_children_but(before)


@pytest.mark.slow
def test_a_fault_in_a_step_is_the_result_of_that_step(checkpoints):
    """And the ranks end with the executor, when nobody refers to it any more."""
    before = children()
    llm = split_llm(checkpoints.path("llama"), logits_processors=["support.faults:Faults"], async_scheduling=True)
    with pytest.raises(EngineDeadError, match=r"rank \d failed: injected: something in the step is wrong"):
        llm.generate([5, 6], SamplingParams(extra_args={"fault": "exception", "at": 2}), use_tqdm=False)
    del llm
    gc.collect()
    wait_for_no_children_but(before)


@pytest.mark.nightly
def test_ranks_that_cannot_load_the_model_end_with_its_error(tmp_path):
    path = write_checkpoint(tmp_path, "llama", {})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    before = children()
    with pytest.raises(ValueError, match="missing: "):
        split_llm(path)
    wait_for_no_children_but(before)


def test_a_class_that_ranks_cannot_import_is_refused_before_any_process_starts(checkpoints):
    class Local(Faults):
        pass

    before = children()
    with pytest.raises(ConfigError, match="put it into a module"):
        split_llm(checkpoints.path("llama"), logits_processors=[Local])
    assert children() == before


PROGRAM = """
import sys
from quire import LLM
print("imported", flush=True)
llm = LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", num_gpu_blocks_override=40, max_num_seqs=4)
print("ready", flush=True)
while True:
    llm.generate([[5, 6, 7]], use_tqdm=False)
"""


def names_in_shared_memory() -> set[str]:
    """Of files that Quire, torch or multiprocessing could have left, not those of databases and browsers beside."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("quire", "torch", "psm_"))}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["loading", "running"])
def test_ranks_end_when_the_executors_process_is_killed_and_leave_no_files(checkpoints, tmp_path: Path, phase):
    """The program is a script without a guard for __main__, which processes of multiprocessing would need."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    folder = tmp_path / "temporary"
    folder.mkdir()
    in_shared_memory = names_in_shared_memory()
    process = subprocess.Popen(
        [sys.executable, str(script), str(checkpoints.path("llama"))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "imported\n"
        if phase == "running":
            assert process.stdout.readline() == "ready\n"
        while len(ranks := psutil.Process(process.pid).children()) < 2:
            time.sleep(0.01)
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(ranks, timeout=LONGEST)
    assert not left
    assert not list(folder.iterdir())
    assert names_in_shared_memory() <= in_shared_memory
