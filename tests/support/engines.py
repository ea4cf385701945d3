"""Small engines in float32 for tests, with either set of kernels, and helpers to run and inspect them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.executor.uniproc import UniprocExecutor
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits, NewRequest, SchedulerOutput
from quire.models.model import LoadedModel
from quire.ops.cpu.build import library
from quire.ops.registry import OPS
from quire.parallel.mesh import Mesh
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import Worker
from support.thread_group import on_every_rank
from support.waiting import LONGEST

MAX_MODEL_LEN = 176  # the longest prompt of the tests, its 64 tokens, and a few
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def make_llm(path: Path, backend: str = "cpu", **options: Any) -> LLM:
    """backend: "cpu" or "reference", for attention and for all other ops."""
    if backend == "cpu" and library() is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    pins = dict.fromkeys(OPS, "reference") if backend == "reference" else {}
    small = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 32, "mamba_block_size": 16}
    llm = LLM(path, **{**small, "attention_backend": backend, "kernels": pins, **options})
    if "attention_backend" not in options and isinstance(llm.core.executor, UniprocExecutor):
        assert {used.name for used in runner_of(llm).forward.backends} <= {backend, "states", "rows"}
    return llm


def generate(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] = GREEDY
) -> list[RequestOutput]:
    """Run all prompts at once. Afterwards the engine must hold no request and no block."""
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    assert_nothing_is_left(llm.core)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def core_request(llm: LLM, request_id: str, prompt: list[int], params: SamplingParams = GREEDY) -> Any:
    return llm.processor.process(request_id, prompt, params).core_requests[0]


def finish(core: EngineCore, limit: int = 10_000) -> dict[str, tuple[list[int], str | None, int | str | None]]:
    """Step until all requests have finished: (token ids, finish reason, stop reason) by request id."""
    made: dict[str, tuple[list[int], str | None, int | str | None]] = {}
    for _ in range(limit):
        if not core.has_unfinished:
            return made
        collect(core, made)
    raise AssertionError(f"not finished after {limit} steps")


def collect(core: EngineCore, made: dict[str, tuple[list[int], str | None, int | str | None]]) -> None:
    for output in core.step():
        token_ids, _, _ = made.setdefault(output.request_id, ([], None, None))
        token_ids.extend(output.new_token_ids)
        reason = None if output.finish_reason is None else output.finish_reason.value
        made[output.request_id] = token_ids, reason, output.stop_reason


def assert_nothing_is_left(core: EngineCore) -> None:
    """Assert that every block and row is free once the steps in flight have retired."""
    while core.has_unfinished:
        assert not core.step(), "these requests are over"
    scheduler = core.scheduler
    assert not scheduler.requests
    assert not scheduler.running
    assert len(scheduler.waiting) == 0
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert sorted(scheduler._free_rows) == list(range(scheduler.limits.max_num_seqs))
    if hasattr(core.executor, "runner"):
        assert not core.executor.runner._launched
        assert not core.executor.runner._unread


def assert_preempted(llm: LLM) -> None:
    """Assert that requests were preempted. With drafts, fewer requests share a step, and it may not come to that."""
    scheduler = llm.core.scheduler
    assert scheduler.stats.preemptions > 0 or scheduler.speculation.is_active


def run_and_leave_no_core(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it to its end. The cores that it starts must have ended by then; those of other tests' fixtures may run."""
    before = core_processes()
    asyncio.run(asyncio.wait_for(coroutine, LONGEST))
    assert core_processes() == before


def core_processes() -> list[psutil.Process]:
    """The processes of engine cores that this process has started, and that have not ended."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if "multiprocessing.spawn" in " ".join(process.cmdline()):
                found.append(process)
    return found


def runner_of(llm: LLM) -> ModelRunner:
    return llm.core.executor.runner


def loaded_by(llm: LLM) -> LoadedModel:
    return llm.core.executor._worker.loaded


def teacher_forced_logits(llm: LLM, text: list[int], chunks: Sequence[int] = ()) -> Tensor:
    """The logits after each token of `text`, computed in steps of `chunks` tokens: [tokens, vocab]."""
    return forced_logits(runner_of(llm), text, chunks)


@torch.inference_mode()
def forced_logits(runner: ModelRunner, text: list[int], chunks: Sequence[int] = ()) -> Tensor:
    """Like teacher_forced_logits, for the runner of one rank. All ranks must call it at the same time."""
    batch, model = runner.batch, runner.model
    groups, count = len(batch.block_tables), -(-len(text) // batch.block_size)
    blocks = list(range(1, groups * count + 1))
    random.Random(0).shuffle(blocks)
    edits = BlockTableEdits(
        [g for g in range(groups) for _ in range(count)], [0] * groups * count, list(range(count)) * groups, blocks
    )
    new = NewRequest("forced", 0, text, len(text), 0, SamplingParams(), 0)
    rows = []
    for index, size in enumerate(chunks or [len(text)]):
        step = SchedulerOutput(index, [new] if index == 0 else [], [0], [size], edits)
        if index == 0:
            batch.install(new)
        batch.edit_block_tables(step)
        flat = batch.flatten(step)
        rows.append(model.logits(runner.forward(runner.staging.stage(flat, flat.size, step, {})[0])))
    return torch.cat(rows)


def runners_of_ranks(path: Path, ranks: int, **options: Any) -> list[Any]:
    """The runners of tensor-parallel ranks that are threads."""
    return [worker.runner for worker in workers_of_ranks(path, ranks, **options)]


def workers_of_ranks(path: Path, ranks: int, **options: Any) -> list[Worker]:
    given = {"dtype": "float32", "max_num_seqs": 4, "tensor_parallel_size": ranks, **options}
    config = EngineConfig.create(model=str(path), **given)
    return on_every_rank(ranks, lambda group: Worker(config, path, MAX_MODEL_LEN, Mesh(group.rank, tp=group)))


def logits_of_ranks(runners: Sequence[Any], text: list[int], chunks: Sequence[int] = ()) -> Tensor:
    """Like teacher_forced_logits. The ranks must agree."""
    made = on_every_rank(len(runners), lambda group: forced_logits(runners[group.rank], text, chunks))
    assert all(torch.equal(logits, made[0]) for logits in made)
    return made[0]
