"""The core in another process: the same answers, whatever happens to it, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import ConfigError
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineDeadError
from quire.engine.core_client import CoreState
from quire.engine.llm import LLM
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from support.engines import core_processes
from support.engines import run_and_leave_no_core as run
from support.faults import FAULTS
from support.waiting import LONGEST, eventually_async

pytestmark = pytest.mark.texts

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=120, ignore_eos=True, n=2)
PROMPTS = [f"Once upon a time there were {i} little" for i in range(8)]
FAULTY = {**OPTIONS, "logits_processors": ["support.faults:Faults"]}


@asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(**{**OPTIONS, **options})
    try:
        await llm.start()
        yield llm
    finally:
        await llm.shutdown()


async def answer(llm: AsyncLLM, name: str, prompt: Any, params: SamplingParams) -> RequestOutput:
    async for output in llm.generate(prompt, params.clone(output_kind=RequestOutputKind.CUMULATIVE), name):
        last = output
    return last


def said(output: RequestOutput) -> list[tuple[list[int], str, str | None]]:
    return [(c.token_ids, c.text, c.finish_reason) for c in output.outputs]


async def everything(llm: AsyncLLM, tag: str = "") -> list[Any]:
    """Greedy and seeded requests at once."""
    made = [answer(llm, f"g{tag}{i}", prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    made += [answer(llm, f"s{tag}{i}", prompt, SEEDED) for i, prompt in enumerate(PROMPTS)]
    return [said(output) for output in await asyncio.gather(*made)]


async def assert_nothing_is_left(llm: AsyncLLM) -> None:
    await eventually_async(lambda: llm.client.stats.kv_cache_usage == 0 and not llm.client.stats.num_running)
    assert (llm.client.stats.num_running, llm.client.stats.num_waiting) == (0, 0)
    assert llm.client.stats.kv_cache_usage == 0
    assert not llm.client._unfinished
    assert not llm.output_processor._sequences
    assert not llm._running
    assert not llm.metrics._sequences


class Shared:
    """An engine for the tests that leave it as it was, and the event loop that it belongs to."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.llm = AsyncLLM(**OPTIONS)
        self.runner.run(self.llm.start())

    def run(self, check: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
        self.runner.run(asyncio.wait_for(check(self.llm), LONGEST))

    def close(self) -> None:
        self.runner.run(self.llm.shutdown())
        self.runner.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    others = core_processes()
    shared = Shared()
    yield shared
    shared.close()
    assert core_processes() == others


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """What the engine says in one process."""
    llm = LLM(**OPTIONS)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False) + llm.generate(PROMPTS, SEEDED, use_tqdm=False)
    return [said(output) for output in outputs]


def test_it_says_what_the_engine_in_one_process_says(shared, expected):
    async def check(llm: AsyncLLM) -> None:
        assert await everything(llm) == expected
        await assert_nothing_is_left(llm)

    shared.run(check)


def test_a_stream_gets_deltas_and_leaving_it_aborts_the_request(shared):
    async def check(llm: AsyncLLM) -> None:
        params = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
        text = ""
        async for output in llm.generate(PROMPTS[0], params, "a"):
            assert output.request_id == "a"
            text += "".join(c.text for c in output.outputs)
        assert text == (await answer(llm, "b", PROMPTS[0], GREEDY)).outputs[0].text
        stream = llm.generate(PROMPTS[0], params.clone(max_tokens=400), "c")
        await anext(stream)
        await stream.aclose()
        await assert_nothing_is_left(llm)

    shared.run(check)


def test_an_aborted_request_ends_with_what_there_is_and_its_id_can_be_used_once_only(shared):
    async def check(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPTS[0], GREEDY.clone(max_tokens=400), "a")
        await anext(stream)
        with pytest.raises(ValueError, match="'a' is in use"):
            await anext(llm.generate(PROMPTS[0], GREEDY, "a"))
        assert llm.abort("a")
        assert not llm.abort("b")
        rest = [output async for output in stream]
        assert rest[-1].outputs[0].finish_reason == "abort"
        await assert_nothing_is_left(llm)

    shared.run(check)


def test_a_stop_string_ends_a_request_in_the_core_too(shared):
    async def check(llm: AsyncLLM) -> None:
        text = (await answer(llm, "a", PROMPTS[0], GREEDY)).outputs[0].text
        stop = text[20:24]
        output = await answer(llm, "b", PROMPTS[0], GREEDY.clone(stop=stop))
        assert output.outputs[0].text == text[: text.index(stop)]
        assert output.outputs[0].stop_reason == stop
        await assert_nothing_is_left(llm)

    shared.run(check)


def test_many_slow_readers_do_not_hold_up_others(shared):
    async def check(llm: AsyncLLM) -> None:
        slow = [llm.generate(prompt, GREEDY, f"slow{i}") for i, prompt in enumerate(PROMPTS)]
        for stream in slow:
            await anext(stream)
        await answer(llm, "fast", PROMPTS[0], GREEDY)  # nobody reads the others
        for stream in slow:
            last = [output async for output in stream][-1]
            assert len(last.outputs[0].token_ids) == GREEDY.max_tokens
        await assert_nothing_is_left(llm)

    shared.run(check)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_go_on_when_the_core_is_lost(expected, signal_number):
    async def check() -> None:
        async with engine() as llm:
            task = asyncio.create_task(everything(llm))
            while not any(s.completion.token_ids for s in llm.output_processor._sequences.values()):
                await asyncio.sleep(0.01)
            os.kill(llm.client.process_ids[0], signal_number)
            assert await task == expected
            assert llm.client.restarts == 1
            await assert_nothing_is_left(llm)
            assert await everything(llm, "again") == expected

    run(check())


@pytest.mark.nightly
def test_requests_with_grammars_go_on_when_the_core_is_lost():
    """The new core follows the tokens that were generated before, within forced stretches and between them."""
    strings = {"type": "array", "items": {"enum": ["hippopotamus", "rhinoceros", "crocodile"]}, "minItems": 9}
    schema = {"type": "object", "properties": {"animals": strings}, "required": ["animals"]}
    params = SEEDED.clone(ignore_eos=False, structured_outputs={"json": schema})
    wanted = [said(output) for output in LLM(**OPTIONS).generate(PROMPTS, params, use_tqdm=False)]

    async def check() -> None:
        async with engine() as llm:
            made = [asyncio.create_task(answer(llm, str(i), prompt, params)) for i, prompt in enumerate(PROMPTS)]
            while not any(len(s.completion.token_ids) > 40 for s in llm.output_processor._sequences.values()):
                await asyncio.sleep(0)
            assert not all(task.done() for task in made)
            os.kill(llm.client.process_ids[0], signal.SIGKILL)
            assert [said(await task) for task in made] == wanted
            assert llm.client.restarts == 1
            await assert_nothing_is_left(llm)

    run(check())


@pytest.mark.nightly
def test_a_request_that_gets_tokens_between_losses_goes_on_after_each():
    async def check() -> None:
        async with engine() as llm:
            params = GREEDY.clone(max_tokens=100)
            wanted = said(await answer(llm, "undisturbed", PROMPTS[0], params))
            task = asyncio.create_task(answer(llm, "disturbed", PROMPTS[0], params))
            for number in range(3):
                while not task.done() and not any(
                    len(s.completion.token_ids) > 20 * number + 5 for s in llm.output_processor._sequences.values()
                ):
                    await asyncio.sleep(0)
                os.kill(llm.client.process_ids[0], signal.SIGKILL)
                while llm.client.restarts == number:
                    await asyncio.sleep(0.01)
                while not llm.client.ready:
                    await asyncio.sleep(0.01)
            assert said(await task) == wanted
            assert llm.client.restarts == 3
            await assert_nothing_is_left(llm)

    run(check())


@pytest.mark.nightly
@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_go_on_after_a_fault_in_a_step(expected, tmp_path: Path, fault):
    async def check() -> None:
        async with engine(**FAULTY) as llm:
            params = GREEDY.clone(extra_args={"fault": fault, "at": 30, "once": str(tmp_path / "done")})
            task = asyncio.create_task(answer(llm, "culprit", PROMPTS[0], params))
            assert await everything(llm) == expected
            assert said(await task) == expected[0]
            assert llm.client.restarts == 1
            await assert_nothing_is_left(llm)

    run(check())


@pytest.mark.slow
@pytest.mark.plain("its fault is at a token, and a step may compute several")
def test_a_request_that_brings_the_core_down_twice_is_refused():
    async def check() -> None:
        async with engine(**FAULTY) as llm:
            params = GREEDY.clone(extra_args={"fault": "exception", "at": 5})
            output = (await answer(llm, "culprit", PROMPTS[0], params)).outputs[0]
            assert output.finish_reason == "error"
            assert "failed twice" in output.stop_reason
            assert len(output.token_ids) == 5
            await answer(llm, "after", PROMPTS[0], GREEDY)
            assert llm.client.restarts == 2
            await assert_nothing_is_left(llm)

    run(check())


@pytest.mark.slow
def test_a_core_that_fails_again_and_again_is_given_up():
    async def check() -> None:
        async with engine() as llm:
            for losses in range(3):
                await eventually_async(lambda losses=losses: llm.is_running and llm.client.restarts == losses)
                os.kill(llm.client.process_ids[0], signal.SIGKILL)
                await eventually_async(lambda: not llm.is_running)
            assert llm.client.state is CoreState.DEAD
            with pytest.raises(EngineDeadError, match="ended unexpectedly"):
                await llm.check_health()
            with pytest.raises(EngineDeadError):
                await answer(llm, "a", PROMPTS[0], GREEDY)

    run(check())


@pytest.mark.slow
def test_requests_that_bring_the_core_down_end_without_it():
    async def check() -> None:
        async with engine(**FAULTY) as llm:
            params = GREEDY.clone(extra_args={"fault": "exception", "at": 0})
            made = await asyncio.gather(*(answer(llm, name, PROMPTS[0], params) for name in "abc"))
            assert {output.outputs[0].finish_reason for output in made} == {"error"}
            assert llm.client.restarts == 4  # the first loss may have any of the three reasons
            await answer(llm, "d", PROMPTS[0], GREEDY)
            await assert_nothing_is_left(llm)

    run(check())


@pytest.mark.slow
def test_options_that_the_model_cannot_meet_are_an_error_at_start():
    async def check() -> None:
        with pytest.raises(ConfigError, match="kv_cache_memory_bytes asks for a KV cache"):
            async with engine(kv_cache_memory_bytes=1 << 50):
                pass
        with pytest.raises(ConfigError, match="max_model_len=4096"):
            AsyncLLM(max_model_len=4096)

    run(check())


@pytest.mark.slow
@pytest.mark.plain("counts the outputs of a stream")
def test_the_metrics_count_what_was_done():
    async def check() -> None:
        async with engine(metrics_prefix="vllm", served_name="small") as llm:
            for name in "ab":
                await answer(llm, name, PROMPTS[0] * 4, GREEDY)
            text = llm.render_metrics().decode()
            tokens = len(llm.get_tokenizer().encode(PROMPTS[0] * 4))
            for line in (
                f'vllm:prompt_tokens_total{{engine="0",model_name="small"}} {2 * tokens}.0',
                'vllm:generation_tokens_total{engine="0",model_name="small"} 240.0',
                'vllm:request_success_total{engine="0",finished_reason="length",model_name="small"} 2.0',
                'vllm:time_to_first_token_seconds_count{engine="0",model_name="small"} 2.0',
                'vllm:inter_token_latency_seconds_count{engine="0",model_name="small"} 238.0',
                f'vllm:prefix_cache_hits_total{{engine="0",model_name="small"}} {(tokens - 1) // 16 * 16}.0',
            ):
                assert line in text

    run(check())


def test_an_output_that_cannot_be_processed_ends_its_request_alone(shared, monkeypatch):
    async def check(llm: AsyncLLM) -> None:
        process = llm.output_processor.process

        def fails_for_one(outputs: Any) -> Any:
            if outputs[0].request_id == "bad":
                raise RuntimeError("a bug")
            return process(outputs)

        monkeypatch.setattr(llm.output_processor, "process", fails_for_one)
        bad, good = await asyncio.gather(*(answer(llm, name, PROMPTS[0], GREEDY) for name in ("bad", "good")))
        assert bad.outputs[0].finish_reason == "error"
        assert len(good.outputs[0].token_ids) == GREEDY.max_tokens
        await assert_nothing_is_left(llm)

    shared.run(check)


def refuse(prefix: str, longest: int | None = None) -> Path:
    raise OSError("no temporary folder can be made")


def test_a_client_that_finds_no_folder_for_its_sockets_does_not_call_itself_ready(monkeypatch):
    monkeypatch.setattr("quire.engine.cores.private_folder", refuse)

    async def check() -> None:
        with pytest.raises(ConfigError, match="no temporary folder can be made"):
            async with engine():
                pass

    run(check())


@pytest.mark.slow
def test_a_client_that_cannot_replace_a_lost_core_ends_its_requests(monkeypatch):
    async def check() -> None:
        async with engine() as llm:
            stream = asyncio.create_task(answer(llm, "open", PROMPTS[0], GREEDY.clone(max_tokens=400)))
            while not llm.client.stats.num_running:
                await asyncio.sleep(0.01)
            monkeypatch.setattr("quire.engine.cores.private_folder", refuse)
            os.kill(llm.client.process_ids[0], signal.SIGKILL)
            output = await stream
            assert output.outputs[0].finish_reason == "error"
            assert "no temporary folder" in str(output.outputs[0].stop_reason)
            assert llm.client.state is CoreState.DEAD

    run(check())
