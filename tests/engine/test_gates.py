"""A core whose requests all wait at a gate sleeps, and the gate wakes it up from another thread."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.config.engine import EngineConfig
from quire.engine.assemble import make_core
from quire.engine.core import EngineCore
from quire.engine.core_process import _serve
from quire.executor.base import Executor
from quire.messages.engine import AddRequests, Connect, EngineCoreRequest, FinishReason, StepOutputs
from quire.scheduler.scheduler import Scheduler
from support.engines import GREEDY, MAX_MODEL_LEN, assert_nothing_is_left, core_request, finish, make_llm
from support.waiting import LONGEST

SECONDS = 0.5


class Timer:
    """Requests named "late ..." pass `SECONDS` after they have first been seen; "bad ..." ones fail then."""

    def __init__(self) -> None:
        self.opened: dict[str, bool] = {}

    def connect(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def ready(self, request: EngineCoreRequest) -> bool:
        name = request.request_id
        if not name.startswith(("late", "bad")):
            return True
        if name not in self.opened:
            self.opened[name] = False
            threading.Timer(SECONDS, self.open, [name]).start()
        if self.opened[name] and name.startswith("bad"):
            raise ValueError("the grammar has no end")
        return self.opened[name]

    def open(self, name: str) -> None:
        self.opened[name] = True
        self.wake()


class CountingScheduler(Scheduler):
    num_schedules = 0

    def schedule(self) -> Any:
        self.num_schedules += 1
        return super().schedule()


def gated_core(executor: Executor, limits: Any, block_size: int) -> tuple[EngineCore, CountingScheduler]:
    kv = executor.kv_cache
    scheduler = CountingScheduler(limits, kv.num_blocks, list(kv.specs), block_size, gates=[Timer()])
    return EngineCore(scheduler, executor), scheduler


def test_a_request_that_waits_at_a_gate_runs_when_it_opens_and_the_core_sleeps_until_then(checkpoints, references):
    llm = make_llm(checkpoints.path("llama"))
    llm.core, scheduler = gated_core(llm.core.executor, llm.core.scheduler.limits, llm.config.cache.block_size)
    first, second = references.continuations("llama")[:2]
    llm.core.add_request(core_request(llm, "late", first.prompt))
    llm.core.add_request(core_request(llm, "bad", first.prompt))
    llm.core.add_request(core_request(llm, "now", second.prompt))
    made = finish(llm.core)
    first.check(made["late"][0])
    second.check(made["now"][0])
    assert made["bad"] == ([], "bad_request", "the grammar has no end")
    llm.core.add_request(core_request(llm, "late again", first.prompt))
    before = scheduler.num_schedules
    first.check(finish(llm.core)["late again"][0])
    assert scheduler.num_schedules - before <= 64 + 5  # one a token, and few while it waited
    assert_nothing_is_left(llm.core)
    llm.core.shutdown()


class Censor:
    """Refuses each request with max_tokens=7."""

    def connect(self, wake: Callable[[], None]) -> None:
        """Each request is decided at once."""

    def ready(self, request: EngineCoreRequest) -> bool:
        if request.max_tokens == 7:
            raise ValueError("the grammar has no end")
        return True


def test_generate_raises_the_reason_for_which_a_gate_refuses_a_request_and_the_engine_goes_on(checkpoints, references):
    llm = make_llm(checkpoints.path("llama"))
    old, continuation = llm.core.scheduler, references.continuations("llama")[0]
    scheduler = Scheduler(old.limits, len(old.kv.pool.blocks), old.kv.specs, old.kv.block_size, gates=[Censor()])
    llm.core = EngineCore(scheduler, llm.core.executor)
    params = [GREEDY.clone(max_tokens=count) for count in (60, 7, 60)]
    with pytest.raises(ValueError, match="the grammar has no end"):
        llm.generate([continuation.prompt] * 3, params, use_tqdm=False)
    assert_nothing_is_left(llm.core)
    [output] = llm.generate(continuation.prompt, GREEDY, use_tqdm=False)
    continuation.check(output.outputs[0].token_ids)
    llm.core.shutdown()


def run_gated_core(address: str, path: Path) -> None:
    inbox = zmq.Context().socket(zmq.ROUTER)
    inbox.bind(address)
    config = EngineConfig.create(model=str(path), dtype="float32", max_num_seqs=4)
    core = make_core(config, path, MAX_MODEL_LEN)
    core, _ = gated_core(core.executor, core.scheduler.limits, config.cache.block_size)
    _serve(core, inbox, lambda report: None)


@pytest.mark.slow
def test_the_core_process_sleeps_while_all_requests_wait_at_gates(checkpoints, references, tmp_path):
    continuation = references.continuations("llama")[0]
    llm = make_llm(checkpoints.path("llama"))
    address = f"ipc://{tmp_path}/core"
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    process = multiprocessing.get_context("spawn").Process(
        target=run_gated_core, args=(address, checkpoints.path("llama"))
    )
    process.start()
    try:
        late = [core_request(llm, name, continuation.prompt, GREEDY) for name in ("late", "bad")]
        for order in (Connect(), AddRequests(late)):
            socket.send(msgspec.msgpack.encode(order))
        said: dict[str, list[int]] = {"late": [], "bad": []}
        ended: dict[str, FinishReason] = {}
        num_silent = 0
        while len(ended) < 2:
            if not socket.poll(1000 * LONGEST):
                pytest.fail("the core process says nothing")
            report = msgspec.msgpack.decode(socket.recv(), type=StepOutputs)
            num_silent += not report.outputs
            for output in report.outputs:
                said[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    ended[output.request_id] = output.finish_reason
        assert ended == {"late": FinishReason.LENGTH, "bad": FinishReason.BAD_REQUEST}
        continuation.check(said["late"])
        assert num_silent <= 5  # a core that does not sleep reports thousands of empty steps
    finally:
        process.kill()
        process.join()
        context.destroy(linger=0)
