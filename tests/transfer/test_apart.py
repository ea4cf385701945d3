"""Two engines: the answers of the one that reads a prompt from the other are those of an engine alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams
from quire.cluster.secret import ClusterSecret, tcp_address
from quire.executor.uniproc import UniprocExecutor
from quire.transfer.core_messages import Fetch, digest
from quire.transfer.link import Link, Told
from quire.transfer.sources import TcpSource
from quire.worker.step_clock import ALL_LAYERS
from support.engines import make_llm
from support.server import eventually
from support.waiting import LONGEST

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "dtype": "float32",
    "max_num_batched_tokens": 64,
}
TEXT = "Once upon a time there was a fox who lived near a river and told stories to everyone. "
PROMPT = TEXT * 12
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("a secret that both engines know, of some length\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def port(worker_id: str) -> int:
    """The first of four free ports in a row, which other workers of pytest do not try."""
    number = int(worker_id.removeprefix("gw")) if worker_id != "master" else 7
    start = 16_000 + 2_000 * (number % 8)  # below the ports that the system gives out
    for first in random.sample(range(start, start + 2_000, 4), 100):
        with contextlib.ExitStack() as stack:
            try:
                for number in range(4):
                    stack.enter_context(socket.create_server(("127.0.0.1", first + number)))
            except OSError:
                continue
            return first
    raise AssertionError("there are no free ports")


@asynccontextmanager
async def engine(secret: str | None, role: str, **options: Any) -> AsyncIterator[AsyncLLM]:
    connector, port = options.pop("connector", "QuireConnector"), options.pop("port", 14579)
    transfer = {"kv_role": role, "kv_port": port, "kv_connector": connector}
    llm = AsyncLLM(**{**SMALL, **options}, kv_transfer_config=transfer, cluster_secret_file=secret)
    try:
        await llm.start()
        yield llm
    finally:
        await llm.shutdown()


async def ask(llm: AsyncLLM, name: str, transfer: dict[str, Any], prompt: str = PROMPT, **fields: Any) -> RequestOutput:
    extra = {"extra_args": {"kv_transfer_params": transfer}} if transfer else {}
    outputs = [output async for output in llm.generate(prompt, SamplingParams(**{**GREEDY, **fields}, **extra), name)]
    return outputs[-1]


async def both(producer: AsyncLLM, consumer: AsyncLLM, port: int, name: str = "a", **fields: Any) -> RequestOutput:
    """The consumer's answer, with the prompt from the producer; both are asked at once."""
    here = {"do_remote_prefill": True, "transfer_id": name, "remote_host": "127.0.0.1", "remote_port": port}
    there = {"do_remote_decode": True, "transfer_id": name}
    prefill = ask(producer, f"p-{name}", there, **{**fields, "max_tokens": 1, "n": 1})
    _, answer = await asyncio.gather(prefill, ask(consumer, f"c-{name}", here, **fields))
    return answer


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, LONGEST))


@cache
def alone(prompt: str = PROMPT, **fields: Any) -> list[list[int]]:
    (output,) = LLM(**SMALL).generate([prompt], SamplingParams(**{**GREEDY, **fields}), use_tqdm=False)
    return [list(completion.token_ids) for completion in output.outputs]


def tokens(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("connector", ["SharedMemoryConnector", "TcpConnector", "NixlConnector"])
def test_a_prompt_is_computed_by_one_engine_and_answered_by_another(secret, port, connector):
    if connector == "NixlConnector":
        pytest.importorskip("nixl")

    async def main() -> None:
        async with (
            engine(secret, "kv_producer", port=port) as p,
            engine(secret, "kv_consumer", connector=connector) as c,
        ):
            answer = await both(p, c, port)
            assert tokens(answer) == alone()
            assert answer.num_cached_tokens == (len(answer.prompt_token_ids) - 1) // 16 * 16
            twice = await both(p, c, port, "b", prompt=PROMPT + "It", n=2, temperature=1, seed=1)
            assert tokens(twice) == alone(PROMPT + "It", n=2, temperature=1, seed=1)
            # As proxies for vLLM do it: one after the other, with what the first answer says.
            first = await ask(p, "x", {"do_remote_decode": True}, "So " + PROMPT, max_tokens=1)
            params = first.kv_transfer_params
            assert params is not None
            assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", port)
            later = await ask(c, "y", params, "So " + PROMPT)
            assert tokens(later) == alone("So " + PROMPT)
            assert later.num_cached_tokens == (len(later.prompt_token_ids) - 1) // 16 * 16

    run(main())


VARIANTS = ["llama", "mistral-window-20", "gemma3", "deepseek_v3", "deepseek_v32", "glm_moe_dsa-shared-selections"]
OTHERS: list[Any] = [
    pytest.param({}, {"tensor_parallel_size": 2}, id="1-2", marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2}, {}, id="2-1"),
    pytest.param({"pipeline_parallel_size": 2}, {}, id="2 stages-1", marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, id="2-2 stages", marks=pytest.mark.slow),
]
ROWS = [[3 + (7 * i + 5 * j + j // 9) % 90 for j in range(200 - 3 * i)] for i in range(4)]


async def compare(path: Path, secret: str | None, port: int, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Prompts that are read from the other engine, several at once, say what one engine says that computes them."""
    options = {"max_model_len": 256, "num_gpu_blocks_override": 200}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = make_llm(path, **options).generate(ROWS, params, use_tqdm=False)
    async with (
        engine(secret, "kv_producer", model=str(path), port=port, **options, **there) as p,
        engine(secret, "kv_consumer", model=str(path), port=port, connector="TcpConnector", **options, **here) as c,
    ):
        prompts: list[Any] = [{"prompt_token_ids": row} for row in ROWS]
        asked = [both(p, c, port, str(i), prompt=prompt, max_tokens=8) for i, prompt in enumerate(prompts)]
        for output, wanted, row in zip(await asyncio.gather(*asked), expected, ROWS, strict=True):
            assert tokens(output) == tokens(wanted)
            assert output.num_cached_tokens == (len(row) - 1) // 16 * 16


@pytest.mark.nightly
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(VARIANTS[0], marks=pytest.mark.slow),
        *VARIANTS[2:],
        pytest.param(VARIANTS[1], marks=pytest.mark.slow),
    ],
)
def test_windows_latents_and_several_groups(checkpoints, secret, port, variant):
    run(compare(checkpoints.path(variant), secret, port, {}, {}))


def test_the_keys_of_indexers_travel_with_the_latents(checkpoints, secret, port):
    """The decoding engine selects tokens by keys that it has not computed, also in layers that share selections."""
    run(compare(checkpoints.path("glm_moe_dsa-shared-selections"), secret, port, {}, {"tensor_parallel_size": 2}))


@pytest.mark.nightly
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("there", "here"), OTHERS)
def test_the_ends_may_have_different_numbers_of_ranks(checkpoints, secret, port, there, here):
    run(compare(checkpoints.path("llama"), secret, port, there, here))


@pytest.mark.sampled(3)
@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_other_models_with_different_numbers_of_ranks(checkpoints, secret, port, variant):
    run(compare(checkpoints.path(variant), secret, port, {"tensor_parallel_size": 2}, {}))


@pytest.mark.parametrize(("there", "here"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.nightly)])
def test_both_ends_may_have_several_replicas(checkpoints, secret, port, there, here):
    """The replica that computes a prompt follows from its transfer_id, and consumers are redirected to it."""
    path = checkpoints.path("llama")
    run(compare(path, secret, port, {"data_parallel_size": there}, {"data_parallel_size": here}))


def test_engines_in_a_private_network_need_no_secret_if_that_is_what_the_operator_wants(checkpoints, port):
    insecure = {"insecure_transfers": True}
    run(compare(checkpoints.path("llama"), None, port, insecure, insecure))


@pytest.mark.nightly
def test_engines_that_do_not_fit_say_so_and_answer(secret, port):
    async def main() -> None:
        async with (
            engine(secret, "kv_producer", port=port) as p,
            engine(secret, "kv_consumer", port=port, block_size=32, num_gpu_blocks_override=100) as c,
        ):
            assert tokens(await both(p, c, port)) == alone()

    run(main())


def test_a_producer_that_is_lost_is_done_without(secret, port):
    async def main() -> None:
        async with engine(secret, "kv_consumer", port=port) as c:
            async with engine(secret, "kv_producer", port=port) as p:
                assert tokens(await both(p, c, port)) == alone()
            prompt = "Then " + PROMPT
            here = {"do_remote_prefill": True, "transfer_id": "c", "remote_host": "127.0.0.1", "remote_port": port}
            assert tokens(await ask(c, "c", here, prompt)) == alone(prompt)

    run(main())


def test_layers_can_be_read_while_the_core_computes_the_next_ones(secret, port):
    transfer = {"kv_role": "kv_producer", "kv_port": port}
    llm = LLM(**{**SMALL, "max_num_batched_tokens": 512}, kv_transfer_config=transfer, cluster_secret_file=secret)
    assert isinstance(llm.core.executor, UniprocExecutor)
    forward, goes_on, layers = llm.core.executor.runner.forward, threading.Event(), list[int]()
    layer_done = forward.layer_done

    def wait_behind_layer() -> None:
        layer_done()
        layers.append(len(layers) + 1)
        assert goes_on.wait(LONGEST)

    forward.layer_done = wait_behind_layer
    link = Link(ClusterSecret.read(secret), None)
    link.start()
    params = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "a"}}
    )
    computing = threading.Thread(target=llm.generate, args=(PROMPT, params), kwargs={"use_tqdm": False})
    computing.start()
    try:
        eventually(lambda: layers == [1])
        (request,) = llm.core.scheduler.requests.values()
        facts = llm.core.scheduler.connectors[0]._exports._facts
        link.tell_producer(tcp_address("127.0.0.1", port), Fetch(1, "a", digest(request.source), [0], facts))
        eventually(lambda: any(isinstance(event, Told) for event in link.events))
        offer = next(event.message for event in link.events if isinstance(event, Told))
        assert len(offer.block_ids) == (request.num_prompt_tokens - 1) // 16
        assert offer.is_last
        source = TcpSource("127.0.0.1", port + 1, ClusterSecret.read(secret))
        assert source.wait(offer.step, 1).layer == 1
        assert layers == [1]
        goes_on.set()
        assert source.wait(offer.step, 99).layer == ALL_LAYERS
        source.close()
    finally:
        goes_on.set()
        computing.join()
        link.close()
        llm.shutdown()
