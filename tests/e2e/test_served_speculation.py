"""A server that speculates says what an engine without speculation says, also when its core is lost."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from quire import LLM, SamplingParams
from quire.checkpoints.hub import bundled_model
from support.server_process import Server
from support.waiting import LONGEST

PROMPTS = [f"Tom has a {name}. The {name} likes Tom. Tom likes the" for name in ("cat", "dog", "bird", "fish")]
SPECULATION = '{"method": "suffix", "num_speculative_tokens": 6, "adaptive": false}'
OPTIONS = ["--dtype", "float32", "--speculative-config", SPECULATION, "--served-model-name", "small"]


def drawing(number: int) -> dict[str, float | int]:
    return {"temperature": 0} if number % 2 else {"temperature": 0.7, "seed": number}


async def streams(server: Server, lose_the_core: bool) -> list[str]:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    begun = asyncio.Semaphore(0)

    async def stream(number: int) -> str:
        text = ""
        async for chunk in await client.completions.create(
            model="small",
            prompt=PROMPTS[number],
            stream=True,
            max_tokens=120,
            extra_body={"ignore_eos": True},
            **drawing(number),
        ):
            begun.release()
            text += chunk.choices[0].text
        return text

    tasks = [asyncio.create_task(stream(number)) for number in range(len(PROMPTS))]
    if lose_the_core:
        await begun.acquire()
        server.core.kill()
    return await asyncio.wait_for(asyncio.gather(*tasks), LONGEST)


@pytest.mark.slow
def test_streams_say_the_same_with_speculation_and_after_a_lost_core():
    params = [SamplingParams(max_tokens=120, ignore_eos=True, **drawing(number)) for number in range(len(PROMPTS))]
    expected = [output.outputs[0].text for output in LLM(dtype="float32").generate(PROMPTS, params, use_tqdm=False)]
    with Server(*OPTIONS) as server:
        assert asyncio.run(streams(server, lose_the_core=False)) == expected
        drafted = server.metric("spec_decode_num_draft_tokens_total")
        accepted = server.metric("spec_decode_num_accepted_tokens_total")
        assert 0 < accepted <= drafted
        assert asyncio.run(streams(server, lose_the_core=True)) == expected
        server.wait_until_idle()


@pytest.mark.nightly
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            {"method": "draft_model", "model": str(bundled_model())}, id="draft-model", marks=pytest.mark.slow
        ),
        pytest.param({"model": "quire-demo/eagle3"}, id="eagle3", marks=pytest.mark.slow),
        pytest.param({"model": "quire-demo/medusa"}, id="medusa", marks=pytest.mark.slow),
    ],
)
def test_streams_say_the_same_with_a_drafter_whose_core_is_lost(model: dict[str, str]):
    params = [SamplingParams(max_tokens=120, ignore_eos=True, **drawing(number)) for number in range(len(PROMPTS))]
    expected = [output.outputs[0].text for output in LLM(dtype="float32").generate(PROMPTS, params, use_tqdm=False)]
    speculation = json.dumps({**model, "num_speculative_tokens": 4, "adaptive": False})
    with Server("--dtype", "float32", "--speculative-config", speculation, "--served-model-name", "small") as server:
        assert asyncio.run(streams(server, lose_the_core=True)) == expected
        assert server.metric("spec_decode_num_draft_tokens_total") > 50
        server.wait_until_idle()
