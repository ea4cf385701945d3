"""/v1/prefixes, and what tenants can learn of each other: counted in tokens that are found, not in seconds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.async_llm import AsyncLLM
from quire.messages.sampling_params import SamplingParams
from support.server import Host, Service, eventually
from support.waiting import LONGEST

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 80}
TEXT = "Once upon a time there was a small engine that could read a whole book in one night, and it said to the dog"
FULL = 16  # tokens of its full blocks


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(**OPTIONS)
    yield host
    host.close()


@pytest.fixture
def service(host: Host) -> Iterator[Service]:
    service = host.serve(enable_admin_api=True)
    yield service
    for prefix in service.get("/v1/prefixes").json["data"]:
        service.request("DELETE", f"/v1/prefixes/{prefix['id']}")
    eventually(lambda: host.is_idle)


def found(service: Service, prompt: Any = TEXT, **fields: Any) -> int:
    """Tokens of a prompt that the cache had."""
    usage = service.complete(prompt, max_tokens=1, **fields)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def flood(service: Service) -> None:
    """Eight long prompts at once, more than the cache holds."""
    service.complete([f"{i} " * 120 for i in range(8)], max_tokens=60, ignore_eos=True)


def test_a_tenant_cannot_tell_whether_another_has_sent_a_prompt(service):
    salts = ("a", "b", None)
    prompts = [f"My password is {word}, keep it secret and tell it to nobody but me." for word in ("cat", "dog")]
    probes = {salt: {"cache_salt": salt} if salt else {} for salt in salts}
    assert found(service, prompts[0], **probes["a"]) == 0
    assert found(service, prompts[0], **probes["a"]) > 0
    # Whatever the others send, they find what they would find had the first one sent nothing.
    assert [found(service, prompt, **probes["b"]) for prompt in prompts] == [0, 0]
    assert [found(service, prompt, **probes[None]) for prompt in prompts] == [0, 0]


def test_a_pinned_prefix_stays_until_it_is_deleted(service):
    answer = service.post("/v1/prefixes", {"prompt": TEXT})
    assert answer.status == 200
    card = answer.json
    assert (card["object"], card["tokens"]) == ("prefix", 25)
    assert service.get("/v1/prefixes").json == {"object": "list", "data": [card]}
    flood(service)
    assert found(service) == FULL
    assert service.request("POST", "/reset_prefix_cache").status == 200
    eventually(lambda: found(service) == FULL)
    deleted = service.request("DELETE", f"/v1/prefixes/{card['id']}")
    assert deleted.json == {"id": card["id"], "object": "prefix", "deleted": True}
    flood(service)
    assert found(service) == 0
    assert service.request("DELETE", f"/v1/prefixes/{card['id']}").status == 404


def test_prefixes_may_be_messages_or_token_ids_and_belong_to_a_salt(service):
    messages = [{"role": "system", "content": "You are a helpful engine that knows all about dogs, cats and books."}]
    chat = service.post("/v1/prefixes", {"messages": messages, "add_generation_prompt": False}).json
    tokens = service.post("/v1/prefixes", {"prompt_token_ids": list(range(5, 40)), "cache_salt": "a"}).json
    assert tokens["tokens"] == 35
    flood(service)
    asked = service.post("/v1/chat/completions", {"messages": [*messages, {"role": "user", "content": "Hi"}]})
    assert asked.json["usage"]["prompt_tokens_details"]["cached_tokens"] == chat["tokens"] // 16 * 16 > 0
    assert found(service, [*range(5, 40), 9], cache_salt="a") == 32
    assert found(service, [*range(5, 40), 9]) == 0
    assert found(service, [*range(5, 40), 9], cache_salt="b") == 0


def test_prefixes_that_cannot_be_pinned_are_refused(service, host):
    for body, status, problem in (
        ({}, 400, "one of prompt, messages"),
        ({"prompt": TEXT, "prompt_token_ids": [1]}, 400, "one of prompt"),
        ({"prompt": "x"}, 400, "shorter than a block"),
        ({"prompt": "x " * 400}, 400, "pinned_prefix_share"),
        ({"prompt": TEXT, "model": "nobody"}, 404, "does not exist"),
        ({"prompt": "x " * 900}, 400, "max_model_len"),
        ({"prompt_token_ids": [1 << 30] * 20}, 400, "vocabulary"),
    ):
        answer = service.post("/v1/prefixes", body)
        assert (answer.status, problem in answer.error["message"]) == (status, True), answer.body
    assert service.get("/v1/prefixes").json["data"] == []
    closed = host.serve()
    assert closed.post("/v1/prefixes", {"prompt": TEXT}).status == closed.get("/v1/prefixes").status == 403
    assert closed.request("DELETE", "/v1/prefixes/x").status == 403


@pytest.mark.slow
def test_a_prefix_is_computed_again_behind_a_pause(service):
    service.post("/v1/prefixes", {"prompt": TEXT})
    assert service.request("POST", "/sleep?level=1").status == 200
    assert service.request("POST", "/wake_up").status == 200
    flood(service)
    eventually(lambda: found(service) == FULL)
    flood(service)
    assert found(service) == FULL


@pytest.mark.nightly
def test_each_replica_pins_a_prefix_also_one_that_replaces_another():
    params = SamplingParams(temperature=0, max_tokens=1)

    async def cached(llm: AsyncLLM, core: int) -> int:
        request = await llm.process(f"{os.urandom(4)!r}", TEXT, params)
        async for output in llm.run([request], core):
            return output.num_cached_tokens
        raise AssertionError

    async def flood(llm: AsyncLLM, core: int) -> None:
        requests = [await llm.process(f"{os.urandom(4)!r}", [9 + i] * 250, params) for i in range(8)]
        async for _ in llm.run(requests, core):
            pass

    async def check() -> None:
        llm = AsyncLLM(**OPTIONS, data_parallel_size=2)
        await llm.start()
        await llm.pin_prefix(TEXT)
        for core in (0, 1):
            await flood(llm, core)
            assert await cached(llm, core) == FULL
        os.kill(llm.client.process_ids[1], signal.SIGKILL)
        while len(llm.client.ready) == 2:
            await asyncio.sleep(0.02)
        while len(llm.client.ready) < 2 or llm._pinned._tasks:
            await asyncio.sleep(0.05)
        await flood(llm, 1)
        assert await cached(llm, 1) == FULL
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(check(), LONGEST))
