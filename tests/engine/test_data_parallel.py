"""Several cores behind one client: the same answers, shared work, and nothing lost with a core."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import ConfigError, EngineConfig
from quire.engine import cores, devices
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_client import CoreState
from quire.engine.llm import LLM
from quire.executor import threads
from quire.messages.lora import LoRARequest
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from support.engines import run_and_leave_no_core as run

pytestmark = [pytest.mark.texts, pytest.mark.slow]

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=100, ignore_eos=True, n=2)
PROMPTS = [f"Once upon a time there were {i} little" for i in range(16)]


@asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(**{**OPTIONS, "data_parallel_size": 2, **options})
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
    """32 streams at once, greedy and seeded."""
    made = [answer(llm, f"g{tag}{i}", prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    made += [answer(llm, f"s{tag}{i}", prompt, SEEDED) for i, prompt in enumerate(PROMPTS)]
    return [said(output) for output in await asyncio.gather(*made)]


async def until_idle(llm: AsyncLLM) -> None:
    while llm.client.stats.kv_cache_usage or llm.client.stats.num_running:
        await asyncio.sleep(0.02)
    assert llm.client.num_unfinished == 0


def counted(llm: AsyncLLM, name: str) -> list[float]:
    """The values of a metric by core."""
    found = re.findall(rf'^quire:{name}{{engine="(\d)".*}} (\S+)$', llm.render_metrics().decode(), re.MULTILINE)
    return [float(value) for _, value in sorted(found)]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """What one engine says in this process."""
    llm = LLM(**OPTIONS)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False) + llm.generate(PROMPTS, SEEDED, use_tqdm=False)
    return [said(output) for output in outputs]


def test_two_cores_share_the_requests_and_say_what_one_says(expected):
    async def check() -> None:
        async with engine() as llm:
            assert len(set(llm.client.process_ids)) == 2
            assert await everything(llm) == expected
            await until_idle(llm)
            assert counted(llm, "generation_tokens_total") == [24 * 100, 24 * 100]
            assert sum(counted(llm, "request_success_total")) == 48
            assert counted(llm, "num_requests_running") == [0, 0]
            assert llm.render_metrics().count(b"quire:cache_config_info{") == 2
            await llm.reset_prefix_cache()
            assert (await answer(llm, "again", PROMPTS[0], GREEDY)).num_cached_tokens == 0

    run(check())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_streams_go_on_at_another_core_when_theirs_is_lost(expected, monkeypatch, signal_number):
    close = cores._Process.close

    async def check() -> None:
        may_start = asyncio.Event()  # a new core, when the process of the lost one is closed

        async def close_later(process: cores._Process, patience: float) -> None:
            await may_start.wait()
            await close(process, patience)

        monkeypatch.setattr(cores._Process, "close", close_later)
        async with engine() as llm:
            task = asyncio.create_task(everything(llm))
            while not any(s.completion.token_ids for s in llm.output_processor._sequences.values()):
                await asyncio.sleep(0.01)
            os.kill(llm.client.process_ids[1], signal_number)
            assert await task == expected
            assert llm.is_running
            assert llm.client.ready == [0]  # the other core did not wait for the new one
            may_start.set()
            while len(llm.client.ready) < 2:
                await asyncio.sleep(0.05)
            assert llm.client.restarts == 1
            assert await everything(llm, "again") == expected
            await until_idle(llm)

    run(check())


@pytest.mark.nightly
def test_requests_wait_while_no_core_is_ready(expected):
    async def check() -> None:
        async with engine() as llm:
            for process_id in llm.client.process_ids:
                os.kill(process_id, signal.SIGKILL)
            while llm.client.ready:
                await asyncio.sleep(0.01)
            assert llm.client.state is CoreState.RESTARTING
            assert not llm.is_running
            assert await everything(llm) == expected
            assert llm.client.restarts == 2

    run(check())


def test_a_request_is_aborted_in_the_core_that_runs_it():
    async def check() -> None:
        async with engine() as llm:
            tasks = [
                asyncio.create_task(answer(llm, str(i), p, GREEDY.clone(max_tokens=400))) for i, p in enumerate(PROMPTS)
            ]
            while not all(core.stats.num_running for core in llm.client._cores):
                await asyncio.sleep(0.01)
            for index in range(0, len(PROMPTS), 2):
                assert llm.abort(str(index))
            reasons = [(await task).outputs[0].finish_reason for task in tasks]
            assert reasons == ["abort", "length"] * (len(PROMPTS) // 2)
            await until_idle(llm)

    run(check())


@pytest.mark.nightly
def test_a_conversation_goes_on_where_its_prefix_is_cached():
    async def check() -> None:
        async with engine(data_parallel_routing="prefix") as llm:
            params, head = GREEDY.clone(max_tokens=4), list(range(100, 228))
            for index in range(4):
                await answer(llm, f"other{index}", [index] * 64, params)
                output = await answer(llm, str(index), {"prompt_token_ids": [*head, *range(index)]}, params)
                assert output.num_cached_tokens == (128 if index else 0)

    run(check())


@pytest.mark.nightly
def test_an_adapter_is_loaded_into_all_cores():
    adapter = LoRARequest("rhyme", 1, "quire-demo/rhyme")
    messages = [{"role": "user", "content": "What is the capital of France?"}]

    async def check() -> None:
        async with engine(enable_lora=True) as llm:
            await llm.add_lora(adapter)
            await until_idle(llm)
            assert counted(llm, "generation_tokens_total") == [1, 1]
            prompt, params = llm.frontend.render_chat(messages), SamplingParams(temperature=0, max_tokens=30)
            texts = set()
            for index in range(4):  # the cores take turns
                outputs = [o async for o in llm.generate(prompt, params, str(index), lora_request=adapter)]
                texts.add(outputs[-1].outputs[0].text)
            assert min(counted(llm, "generation_tokens_total")) > 2
            assert len(texts) == 1
            assert texts != {(await answer(llm, "plain", prompt, params)).outputs[0].text}

    run(check())


@pytest.mark.nightly
def test_an_engine_whose_cores_are_given_up_one_after_the_other_ends_with_the_last():
    async def check() -> None:
        async with engine(logits_processors=["support.faults:Faults"]) as llm:
            fault = GREEDY.clone(extra_args={"fault": "exception", "at": 0})
            for index in range(8):
                if llm.client.state is CoreState.DEAD:
                    break
                output = (await answer(llm, str(index), PROMPTS[0], fault)).outputs[0]
                assert output.finish_reason == "error"
            assert llm.client.state is CoreState.DEAD

    run(check())


@pytest.mark.nightly
def test_options_that_one_core_cannot_meet_are_an_error_at_start():
    async def check() -> None:
        with pytest.raises(ConfigError, match="kv_cache_memory_bytes asks for a KV cache"):
            async with engine(kv_cache_memory_bytes=1 << 50):
                pass

    run(check())


def test_one_of_several_servers_has_its_replica_under_its_own_number():
    async def check() -> None:
        async with engine(data_parallel_size=4, data_parallel_rank=3) as llm:
            assert len(llm.client.process_ids) == 1
            await answer(llm, "a", PROMPTS[0], GREEDY.clone(max_tokens=5))
            metrics = llm.render_metrics().decode()
            assert 'quire:generation_tokens_total{engine="3",' in metrics
            assert 'engine="0"' not in metrics

    run(check())


def test_an_engine_in_one_process_has_one_core():
    with pytest.raises(ConfigError, match=r"data_parallel_size cannot be used in an LLM.*quire serve"):
        LLM(**OPTIONS, data_parallel_size=2)


def test_threads_are_divided_among_replicas(monkeypatch):
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "processors", lambda: 8)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 12)
    monkeypatch.setattr(threads.torch, "set_num_threads", chosen.append)
    for replicas in (1, 2, 3, 16):
        threads.limit_threads(replicas)
    assert chosen == [8, 4, 2, 1]


@pytest.mark.parametrize(("visible", "expected"), [(None, "2,3"), ("7,5,3,1", "3,1")])
def test_each_replica_has_gpus_of_its_own(monkeypatch, visible, expected):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = EngineConfig.create(data_parallel_size=2, tensor_parallel_size=2)
    devices.take_devices(1, config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    with pytest.raises(ConfigError, match="data_parallel_size=3 needs 6 GPUs, but there are 4"):
        devices.take_devices(0, EngineConfig.create(data_parallel_size=3, tensor_parallel_size=2))


def test_replicas_choose_their_gpus_before_cuda_is_initialized(tmp_path):
    """CUDA reads CUDA_VISIBLE_DEVICES when it is initialized. support/cuda_init writes it down then."""
    log = tmp_path / "initialized"
    program = """
        import asyncio
        from quire.engine.async_llm import AsyncLLM

        async def main():
            llm = AsyncLLM(dtype="float32", max_model_len=128, max_num_seqs=4, data_parallel_size=2)
            await llm.start()
            await llm.shutdown()

        if __name__ == "__main__":
            asyncio.run(main())
    """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    folder = Path(__file__).parents[1] / "support" / "cuda_init"
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHONPATH": str(folder), "CUDA_INIT_LOG": str(log)}
    subprocess.run([sys.executable, str(file)], env=environment, check=True)
    assert sorted(log.read_text().split()) == ["0", "1"]


def test_gpus_are_counted_in_another_process_without_the_management_library(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(devices, "_has_management_library", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("CUDA is initialized here"))
    assert devices._count_gpus() == 0 or torch.version.cuda is not None


def test_the_gpus_of_a_machine_are_counted_from_its_first_replica(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = {"data_parallel_size_local": 2, "data_parallel_start_rank": 4}
    devices.take_devices(5, EngineConfig.create(data_parallel_size=8, tensor_parallel_size=2, **options))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    options["data_parallel_size_local"] = 3
    config = EngineConfig.create(data_parallel_size=8, tensor_parallel_size=2, **options)
    with pytest.raises(ConfigError, match="data_parallel_size_local=3 needs 6 GPUs, but there are 4"):
        devices.take_devices(4, config)
