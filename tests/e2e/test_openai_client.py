"""`quire serve` as people run it, in a process of its own, asked by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from support.server_process import Server

pytestmark = pytest.mark.texts

OPTIONS = {"dtype": "float32", "max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20}
FLAGS = "--dtype float32 --max-num-seqs 64 --kv-cache-memory-bytes 256M --api-key sk-test".split()
TEXT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story about a brave little boat."}]
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Server(*FLAGS) as server:
        yield server.url
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    [card] = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id
    return card.id


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(**OPTIONS)


def offline_texts(offline: LLM, prompts: list[str], **sampling) -> list[str]:
    outputs = offline.generate(prompts, SamplingParams(max_tokens=32, **sampling), use_tqdm=False)
    return [completion.text for output in outputs for completion in output.outputs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_completions_say_what_the_offline_engine_says(client, model, offline, sampling):
    expected = offline_texts(offline, [TEXT, "The king"], **sampling)
    answer = client.completions.create(model=model, prompt=[TEXT, "The king"], max_tokens=32, **sampling)
    assert [choice.text for choice in answer.choices] == expected
    texts = ["", ""]
    for chunk in client.completions.create(
        model=model, prompt=[TEXT, "The king"], max_tokens=32, stream=True, **sampling
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", [GREEDY, {**SEEDED, "n": 3}], ids=["greedy", "seeded"])
def test_chats_say_what_the_offline_engine_says(client, model, offline, sampling):
    [output] = offline.chat(MESSAGES, SamplingParams(max_tokens=32, **sampling), use_tqdm=False)
    expected = [completion.text for completion in output.outputs]
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=32, **sampling)
    assert [choice.message.content for choice in answer.choices] == expected
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    texts = [""] * len(expected)
    for chunk in client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=32, stream=True, **sampling
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected


def test_the_clients_own_stream_helper_gathers_a_chat(client, model):
    with client.chat.completions.stream(
        model=model,
        messages=MESSAGES,
        max_tokens=64,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stop=["."],
        stream_options={"include_usage": True},
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=64, temperature=0, stop=["."])
    assert final.choices[0].message.content == "".join(deltas) == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage.completion_tokens == whole.usage.completion_tokens == len(final.choices[0].logprobs.content)
    assert all(len(entry.top_logprobs) == 2 for entry in final.choices[0].logprobs.content)


def test_vllms_extra_fields_pass_through_the_client(client, model):
    extra = {"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 4, "priority": 0}
    answer = client.completions.create(
        model=model, prompt=TEXT, max_tokens=8, temperature=1, extra_body={**extra, "return_token_ids": True}
    )
    assert len(answer.choices[0].token_ids) == 8


def test_errors_have_the_clients_types(client, model, url):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt=TEXT, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt=TEXT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as stranger:
        stranger.models.list()


@pytest.mark.slow
def test_96_requests_at_once_say_what_they_say_alone(url, model, offline):
    prompts = [
        f"{TEXT} there was a {what} who had {n} friends" for n in range(24) for what in ("dog", "cat", "boy", "hen")
    ]
    expected = offline_texts(offline, prompts, **GREEDY)

    async def ask(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> str:
        answer = await client.completions.create(
            model=model, prompt=prompt, max_tokens=32, temperature=0, stream=stream
        )
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt, n % 3 > 0) for n, prompt in enumerate(prompts)))

    assert asyncio.run(ask_all()) == expected


def test_what_a_scraper_and_a_probe_read_needs_no_key(client, url):
    def read(path: str) -> bytes:
        with urllib.request.urlopen(f"{url}{path}") as answer:
            return answer.read()

    assert read("/health") == read("/ping") == b'{"reference_kernels":false}'
    assert "version" in json.loads(read("/version"))
    metrics = read("/metrics").decode()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert float(re.search(rf"^quire:{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)[1]) == 0
