"""A step for which the device has no memory costs its newest request, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.engine.llm import LLM
from support.engines import assert_nothing_is_left, collect, core_request, make_llm
from support.late_device import run_late


@pytest.mark.sampled(6)
@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.sampled(6)), 2])
@pytest.mark.parametrize("where", ["forward", "sampler"])
def test_the_newest_requests_fail_and_the_others_go_on(checkpoints, references, monkeypatch, depth, where):
    """Beyond 8 rows there is no memory."""
    llm: LLM = make_llm(checkpoints.path("llama"))
    if depth:
        run_late(llm, depth)
    runner: Any = llm.core.executor.runner
    real = getattr(runner, where)

    class Limited:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def __call__(self, first: Any, *others: Any) -> Any:
            if (first.size.requests if where == "forward" else len(first)) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(first, *others)

    monkeypatch.setattr(runner, where, Limited())
    expected = references.continuations("llama")[:12]
    made: dict[str, Any] = {}
    for i, continuation in enumerate(expected):
        llm.core.add_request(core_request(llm, str(i), continuation.prompt))
        if i % 3 == 2:
            collect(llm.core, made)
    while llm.core.has_unfinished:
        collect(llm.core, made)
    failed = [i for i in range(len(expected)) if made[str(i)][1] == "error"]
    assert failed == list(range(8, 12))
    assert all("ran out of memory" in made[str(i)][2] for i in failed)
    for i, continuation in enumerate(expected[:8]):
        continuation.check(made[str(i)][0])
    assert_nothing_is_left(llm.core)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.sampled(6)), 2])
def test_what_a_step_without_memory_would_have_computed_is_not_in_the_prefix_cache(
    checkpoints, references, monkeypatch, depth
):
    """The step after it is in flight, and shares blocks that were never filled."""
    llm: LLM = make_llm(checkpoints.path("llama"))
    if depth:
        run_late(llm, depth)
    runner: Any = llm.core.executor.runner
    real, calls = runner.sampler, 0

    def fails_once(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(runner, "sampler", fails_once)
    first, shared = references.continuations("llama")[0], references.continuations("llama")[8]
    made: dict[str, Any] = {}
    llm.core.add_request(core_request(llm, "first", first.prompt))
    collect(llm.core, made)
    llm.core.add_request(core_request(llm, "kept", shared.prompt))
    llm.core.add_request(core_request(llm, "newest", shared.prompt))
    collect(llm.core, made)
    llm.core.add_request(core_request(llm, "later", shared.prompt))
    while llm.core.has_unfinished:
        collect(llm.core, made)
    assert sum(reason == "error" for _, reason, _ in made.values()) == 1
    for name, continuation in (("first", first), ("kept", shared), ("later", shared), ("newest", shared)):
        if made[name][1] != "error":
            continuation.check(made[name][0])
    assert llm.core.scheduler.epoch == 1
    assert_nothing_is_left(llm.core)
