"""Replicas that share experts, in real processes: they answer, pause, wake each other, and are lost together."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from quire.config.engine import ConfigError
from quire.engine.async_llm import AsyncLLM
from quire.messages.engine import RendezvousPlace
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.parallel.mesh import open_meeting
from support.engines import generate, make_llm, tokens_of
from support.engines import run_and_leave_no_core as run
from support.waiting import LONGEST

pytestmark = [pytest.mark.texts, pytest.mark.slow]

PARAMS = [
    SamplingParams(temperature=0, max_tokens=100, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True),
]
PROMPTS = [[5 + i, 7, 9, 11 + i] for i in range(16)]
REQUESTS = [(prompt, params) for prompt in PROMPTS for params in PARAMS]


@asynccontextmanager
async def engine(path: Any, **options: Any) -> AsyncIterator[AsyncLLM]:
    small = {"dtype": "float32", "max_model_len": 176, "max_num_seqs": 32, "enable_expert_parallel": True}
    llm = AsyncLLM(path, **{**small, "data_parallel_size": 2, **options})
    try:
        await llm.start()
        yield llm
    finally:
        await llm.shutdown()


async def answer(llm: AsyncLLM, name: str, prompt: list[int], params: SamplingParams) -> RequestOutput:
    params = params.clone(output_kind=RequestOutputKind.CUMULATIVE)
    async for output in llm.generate({"prompt_token_ids": prompt}, params, name):
        last = output
    return last


async def everything(llm: AsyncLLM, tag: str) -> list[list[int]]:
    made = [answer(llm, f"{tag}{i}", *request) for i, request in enumerate(REQUESTS)]
    return tokens_of(await asyncio.gather(*made))


@pytest.fixture(scope="module")
def path(checkpoints):
    return checkpoints.path("qwen3_moe")


@pytest.fixture(scope="module")
def expected(path) -> list[list[int]]:
    prompts, params = zip(*REQUESTS, strict=True)
    return tokens_of(generate(make_llm(path), prompts, list(params)))


def cpu_seconds(llm: AsyncLLM, seconds: float) -> float:
    """The processor time that all cores take while this process takes so many seconds of it."""

    def total() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in llm.client.process_ids if pid)

    before, end = total(), time.process_time() + seconds
    while time.process_time() < end:
        pass
    return total() - before


@pytest.mark.nightly
def test_one_request_wakes_all_cores_and_when_it_ends_they_pause(path, expected):
    async def check() -> None:
        async with engine(path) as llm:
            assert await everything(llm, "all") == expected
            for again in range(2):
                assert (await answer(llm, f"one{again}", *REQUESTS[again])).outputs[0].token_ids == expected[again]
                while await asyncio.to_thread(cpu_seconds, llm, 0.5) > 0.1:  # until nobody runs dummy steps any more
                    pass

    run(check())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "lost", "number"),
    [
        ({}, 1, signal.SIGKILL),
        pytest.param({}, 0, signal.SIGSTOP, marks=pytest.mark.nightly),
        pytest.param({"tensor_parallel_size": 2}, 0, signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param({"data_parallel_size": 3}, 2, signal.SIGSTOP, marks=pytest.mark.nightly),
    ],
)
def test_a_lost_core_takes_the_others_along_and_all_streams_go_on(path, expected, options, lost, number):
    async def check() -> None:
        async with engine(path, **options) as llm:
            before = list(llm.client.process_ids)
            task = asyncio.create_task(everything(llm, "first"))
            while not any(s.completion.token_ids for s in llm.output_processor._sequences.values()):
                await asyncio.sleep(0.01)
            os.kill(before[lost], number)
            assert await task == expected
            while len(llm.client.ready) < len(before):
                await asyncio.sleep(0.05)
            assert not set(before) & set(llm.client.process_ids)
            assert await everything(llm, "second") == expected

    run(check())


def test_an_option_that_one_core_refuses_ends_all_of_them(path):
    async def check() -> None:
        with pytest.raises(ConfigError, match="a model that has no experts"):
            async with engine(None):
                pass

    run(check())


def test_waves_of_two_cores(monkeypatch):
    """The real store, coordinator and group, with cores that are threads."""
    import threading

    from quire.engine import lockstep

    monkeypatch.setattr(lockstep, "STEPS_TO_AGREE", 4)
    store = open_meeting("127.0.0.1")
    waves: list[Any] = [None, None]

    def place(replica: int) -> RendezvousPlace:
        return RendezvousPlace(replica, f"127.0.0.1:{store.port}", "127.0.0.1", b"a" * 32)

    def join(replica: int) -> None:
        waves[replica] = lockstep.Waves(place(replica), 2)

    def in_both(work: Any) -> None:
        threads = [threading.Thread(target=work, args=(replica,)) for replica in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONGEST)

    in_both(join)
    woken = threading.Event()
    told = threading.Event()  # the coordinator knows of a wave
    waves[0].connect(told.set)
    for wave in range(3):
        assert not waves[0].is_running
        assert not waves[1].is_running
        waves[0].begin()
        if not wave:  # the first one begins before the other core listens
            assert told.wait(LONGEST)
            waves[1].connect(woken.set)
        assert woken.wait(LONGEST)
        woken.clear()
        assert waves[1].is_running
        busy = iter([True, False])

        def steps(replica: int, busy: Any = busy) -> None:
            for is_busy in (True, False):
                for _ in range(4):
                    waves[replica].count_step(is_busy and replica == 0)

        in_both(steps)
        assert [w._wave for w in waves] == [wave + 1, wave + 1]
    for w in waves:
        w.close()


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True, "all2all_backend": "allgather_reducescatter"}])
def test_replicas_that_share_experts_sleep_together_and_go_on(path, expected, options):
    async def check() -> None:
        async with engine(path, **options) as llm:
            for level, mode in ((1, "keep"), (2, "keep"), (1, "wait")):
                task = asyncio.create_task(everything(llm, f"{level}{mode}"))
                while not llm.client.stats.num_running:
                    await asyncio.sleep(0.01)
                await llm.sleep(level, mode=mode)
                assert await llm.is_sleeping()
                assert await asyncio.to_thread(cpu_seconds, llm, 0.5) < 0.2, "steps run while the engine sleeps"
                await llm.wake_up(["weights"])
                assert await llm.is_sleeping()
                await llm.wake_up()
                assert await task == expected

    run(check())


@pytest.mark.nightly
def test_replicas_that_share_experts_pause_together_and_take_weights(path, expected):
    async def check() -> None:
        async with engine(path) as llm:
            task = asyncio.create_task(everything(llm, "b"))
            while not llm.client.stats.num_running:
                await asyncio.sleep(0.01)
            await llm.pause_generation(mode="keep")
            assert not llm.client.stats.num_running
            await llm.update_weights(str(path))
            assert not task.done()
            await llm.resume_generation()
            assert await task == expected
            task = asyncio.create_task(everything(llm, "c"))
            while not llm.client.stats.num_running:
                await asyncio.sleep(0.01)
            await llm.update_weights(str(path))
            assert await task == expected

    run(check())
