"""32 streams from a server at once, in the middle of which something happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai

from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from support.waiting import LONGEST

MODEL = "small"
STREAMS, TOKENS = 32, 100


def prompt(number: int) -> str:
    return f"Once upon a time there were {number}"


def drawing(number: int) -> dict[str, Any]:
    """Every other stream is greedy, and the rest have seeds."""
    return {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number}


async def stream(client: Any, number: int, started: asyncio.Semaphore | None = None, **extra: Any) -> tuple[str, str]:
    """(text, finish reason) of a completion."""
    text, reason = "", None
    async for chunk in await client.completions.create(
        model=MODEL,
        prompt=prompt(number),
        stream=True,
        max_tokens=TOKENS,
        **drawing(number),
        extra_body={"ignore_eos": True, **extra},
    ):
        if started is not None and not text:
            started.release()
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    return text, str(reason)


async def all_streams(url: str, fault: Callable[[], object] | None = None, **extra: Any) -> list[Any]:
    """All at once; the fault happens when every stream has begun. A stream that fails gives its exception."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LONGEST)
    started = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(stream(client, i, started, **(extra if i == 0 else {}))) for i in range(STREAMS)]
    if fault is not None:
        for _ in range(STREAMS):
            await started.acquire()
        await asyncio.to_thread(fault)
    made = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LONGEST)
    await client.close()
    return made


def expected_streams(**options: Any) -> list[tuple[str, str]]:
    """What the streams say, by an engine in this process."""
    llm = LLM(dtype="float32", **options)
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, **drawing(i)) for i in range(STREAMS)]
    outputs = llm.generate([prompt(i) for i in range(STREAMS)], params, use_tqdm=False)
    return [(output.outputs[0].text, str(output.outputs[0].finish_reason)) for output in outputs]
