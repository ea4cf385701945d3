"""An engine that starts before its CPU kernels are compiled: reference kernels first, then the compiled ones."""

from __future__ import annotations

import logging
import shutil

import pytest

from quire import LLM, SamplingParams
from quire.messages.changes import Pause, ReadWeights, Resume, TakeWeights
from quire.ops.cpu import build
from support.engines import GREEDY, MAX_MODEL_LEN, core_request
from support.late_kernels import LateKernels

pytestmark = [
    pytest.mark.skipif(build.library() is None, reason="the CPU kernels cannot be compiled here"),
    pytest.mark.plain("drafts are made for one kind of kernels, so such an engine waits"),
]


@pytest.fixture
def late(monkeypatch):
    kernels = LateKernels()
    monkeypatch.setattr(build, "_plan", build._Plan(background=kernels))
    build.library.cache_clear()
    yield kernels
    kernels.has_ended = True
    build.library.cache_clear()


def make_llm(path, **options):
    return LLM(path, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=8, **options)


def steps(core, count=1):
    """The tokens of some steps, by request id."""
    made: dict[str, list[int]] = {}
    for _ in range(count):
        for output in core.step():
            made.setdefault(output.request_id, []).extend(output.new_token_ids)
    return made


def finish(core, made):
    while core.has_unfinished:
        for request_id, tokens in steps(core).items():
            made.setdefault(request_id, []).extend(tokens)
    return made


def test_requests_run_at_once_change_kernels_midway_and_those_with_a_seed_wait(checkpoints, references, late):
    llm = make_llm(checkpoints.path("llama"))
    core, (first, second) = llm.core, references.continuations("llama")[:2]
    assert core.stats.runs_reference
    core.add_request(core_request(llm, "first", first.prompt))
    core.add_request(core_request(llm, "seeded", second.prompt, GREEDY.clone(seed=5)))
    made = steps(core, 4)
    assert set(made) == {"first"}
    assert len(made["first"]) >= 3
    late.arrive()
    finish(core, made)
    assert not core.stats.runs_reference
    assert llm.core.executor.kv_cache.num_blocks == core.scheduler.kv.pool.num_usable + 1
    first.check(made["first"])
    second.check(made["seeded"])
    assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_usable


def test_an_idle_engine_changes_when_it_is_woken(checkpoints, references, late):
    llm = make_llm(checkpoints.path("llama"))
    assert not llm.core.has_work
    late.arrive()
    assert llm.core.wake_up.wait(0)
    assert llm.core.step() == []
    assert not llm.core.stats.runs_reference
    continuation = references.continuations("llama")[0]
    llm.core.add_request(core_request(llm, "late", continuation.prompt))
    continuation.check(finish(llm.core, {})["late"])


def test_kernels_that_cannot_be_compiled_are_an_error_in_the_log_and_everything_goes_on(
    checkpoints, references, late, caplog
):
    llm = make_llm(checkpoints.path("llama"))
    continuation = references.continuations("llama")[0]
    llm.core.add_request(core_request(llm, "seeded", continuation.prompt, GREEDY.clone(seed=5)))
    with caplog.at_level(logging.ERROR, logger="quire"):
        late.arrive("g++ failed:\nno space left")
        continuation.check(finish(llm.core, {})["seeded"])
    assert llm.core.stats.runs_reference
    assert "no space left" in caplog.text


def test_a_paused_engine_changes_when_it_resumes(checkpoints, references, late):
    llm = make_llm(checkpoints.path("llama"))
    core, continuation = llm.core, references.continuations("llama")[0]
    core.add_request(core_request(llm, "held", continuation.prompt))
    made = steps(core, 2)
    core.carry_out(Pause("keep"))
    late.arrive()
    core.wake_up.wait(0)
    assert core.stats.runs_reference
    core.carry_out(Resume())
    continuation.check(finish(core, made)["held"])
    assert not core.stats.runs_reference


def test_new_weights_are_read_for_the_compiled_kernels(checkpoints, late, tmp_path):
    llm = make_llm(checkpoints.path("llama"))
    shutil.copytree(checkpoints.path("llama"), tmp_path / "copy")
    llm.core.carry_out(ReadWeights(str(tmp_path / "copy")))
    assert not llm.core.stats.runs_reference
    llm.core.carry_out(TakeWeights(True))
    assert llm.generate("Once", SamplingParams(max_tokens=3))[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"wait_for_kernels": True},
        {"batch_invariant": True},
        {"kernels": {"linear": "reference"}},
        {"kv_offloading_size": 0.01},
        {"attention_backend": "reference"},
    ],
)
def test_engines_that_wait_for_their_kernels(checkpoints, monkeypatch, options):
    prepared = []
    monkeypatch.setattr(build, "prepare", lambda units, may_defer: prepared.append(may_defer))
    make_llm(checkpoints.path("llama"), **options)
    make_llm(checkpoints.path("llama"))
    assert prepared == [False, True]
