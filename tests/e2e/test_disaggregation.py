"""Prompts are computed on one machine and answered on another, behind `quire route`, and faults of either end or of the
link between them are not heard by any client."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai
import psutil
import pytest

from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from support.nodes import ADDRESSES, Machines, OnMachine, two_machines
from support.server import request
from support.streams import MODEL, STREAMS, drawing
from support.waiting import LONGEST, eventually

pytestmark = pytest.mark.slow

TEXT = "a fox who lived near a river and told stories to all the animals that came to drink. "
TOKENS = 40
OPTIONS = [
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--num-gpu-blocks-override",
    "1100",
    "--max-num-seqs",
    "40",
    "--max-num-batched-tokens",
    "64",
    "--served-model-name",
    MODEL,
]


LONG = [{"role": "user", "content": f"Tell me about {TEXT * 15}"}]
OTHER_APIS = {
    "/v1/chat/completions": {"messages": [{"role": "system", "content": "Be brief."}, *LONG], "max_tokens": 5},
    "/v1/messages": {"messages": LONG, "max_tokens": 5, "system": "Be kind."},
    "/v1/responses": {"input": LONG, "max_output_tokens": 5, "instructions": "Be nice.", "store": False},
}


class RouteOnMachine(OnMachine):
    command, ready_line = "route", r"Routing at (\S+): "


def prompt(number: int) -> str:
    return f"Number {number}. Once upon a time there was {TEXT * 20}"


@pytest.fixture(scope="module")
def expected() -> list[str]:
    llm = LLM(dtype="float32", max_model_len=512)
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, **drawing(i)) for i in range(STREAMS)]
    outputs = llm.generate([prompt(i) for i in range(STREAMS)], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with two_machines(tmp_path_factory.mktemp("machines")) as machines:
        yield machines


def server(machines: Machines, number: int, host: str, **transfer: str) -> OnMachine:
    more = ["--kv-transfer-config", json.dumps(transfer)]
    return OnMachine(machines[number], *OPTIONS, "--host", host, *more)


@contextmanager
def apart(machines: Machines) -> Iterator[tuple[OnMachine, OnMachine, RouteOnMachine]]:
    """The producer on machine 1, the consumer on machine 0, and the proxy in front of both."""
    there = ADDRESSES[1]
    with (
        server(machines, 1, there, kv_role="kv_producer", kv_ip=there) as producer,
        server(machines, 0, machines.host, kv_role="kv_consumer", kv_connector="TcpConnector") as consumer,
        RouteOnMachine(
            machines[0],
            "--host",
            machines.host,
            "--backend",
            consumer.url,
            "--prefill",
            producer.url,
            "--health-check-interval",
            "0.5",
            "--prefill-min-bytes",
            "0",
            own_files=False,
        ) as route,
    ):
        yield producer, consumer, route
        machines.mend()
    for machine in machines.both:
        machine.wait_until_empty()


async def ask_all(url: str, fault: Callable[[], object] | None) -> list[str]:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LONGEST)

    async def ask(number: int) -> str:
        answer = await client.completions.create(
            model=MODEL, prompt=prompt(number), max_tokens=TOKENS, **drawing(number), extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    tasks = [asyncio.create_task(ask(i)) for i in range(STREAMS)]
    if fault is not None:
        await asyncio.to_thread(fault)
    said = await asyncio.gather(*tasks)
    await client.close()
    return said


def check(route: RouteOnMachine, expected: list[str], fault: Callable[[], object] | None = None) -> None:
    assert asyncio.run(ask_all(route.url, fault)) == expected


def core(server: OnMachine) -> psutil.Process:
    (found,) = (p for p in server.main.children() if "resource_tracker" not in " ".join(p.cmdline()))
    return found


def cut(machines: Machines) -> None:
    machines.lose_packets(100)
    time.sleep(10)
    machines.lose_packets(0)


@pytest.mark.nightly
def test_prompts_come_from_the_other_machine(machines, expected):
    with apart(machines) as (_, consumer, route):
        check(route, expected)
        # All but the last block, and what the prefix cache has, came over the link.
        assert consumer.metric("external_prefix_cache_hits_total") > 0.8 * consumer.metric("prompt_tokens_total") - 600
        consumer.wait_until_idle()
        for path, body in OTHER_APIS.items():
            before = consumer.metric("external_prefix_cache_hits_total")
            content = json.dumps({"model": MODEL, **body}).encode()
            answer = request(route.url, "POST", path, content, Content_Type="application/json")
            assert answer.status == 200, answer.body
            assert consumer.metric("external_prefix_cache_hits_total") > before + 200, path
        machines.delay_packets(0.2)
        check(route, expected)
        machines.mend()


FAULTS: dict[str, Callable[[Machines, OnMachine, OnMachine], object]] = {
    "producer killed": lambda machines, producer, consumer: producer.main.kill(),
    "producer's core killed": lambda machines, producer, consumer: core(producer).kill(),
    "producer's core stopped": lambda machines, producer, consumer: core(producer).send_signal(signal.SIGSTOP),
    "consumer's core killed": lambda machines, producer, consumer: core(consumer).kill(),
    "link cut": lambda machines, producer, consumer: cut(machines),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fault",
    [
        name if name in ("producer killed", "link cut") else pytest.param(name, marks=pytest.mark.nightly)
        for name in FAULTS
    ],
)
def test_nothing_is_lost(machines, expected, fault):
    with apart(machines) as (producer, consumer, route):

        def happen() -> None:
            eventually(lambda: consumer.metric("external_prefix_cache_hits_total"))  # some prompts have come
            FAULTS[fault](machines, producer, consumer)

        check(route, expected, happen)
        consumer.wait_until_idle()
        if fault != "producer killed":
            check(route, expected)
