"""OpenAI's own client with the API of responses."""

import asyncio
import json
from typing import Any

import openai
from question import WEATHER, Place, Question, answer


def ask(question: Question) -> dict[str, object]:
    address: dict[str, Any] = {"base_url": question.url, "api_key": question.key, "max_retries": 0}
    client = openai.OpenAI(**address, _strict_response_validation=True)
    options: dict[str, Any] = {"model": question.model, "max_output_tokens": question.tokens, "temperature": 0}
    whole = client.responses.create(input=question.prompt, **options)
    events = list(client.responses.create(input=question.prompt, **options, stream=True))

    async def ask_later() -> str:
        async with openai.AsyncOpenAI(**address) as client:
            return (await client.responses.create(input=question.prompt, **options)).output_text

    tools: dict[str, Any] = {**options, "max_output_tokens": 120, "tools": [{"type": "function", **WEATHER}]}
    called = client.responses.create(input=question.weather, **tools)
    with client.responses.stream(input=question.weather, **tools) as stream:
        called_in_a_stream = stream.get_final_response()
    result: Any = {"type": "function_call_output", "call_id": called.output[0].call_id, "output": question.sky}
    turns = [{"role": "user", "content": question.weather}, *called.output, result]
    parsed = client.responses.parse(input=question.prompt, text_format=Place, **options)
    return {
        "chat": whole.output_text,
        "chat/stream": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "chat/async": asyncio.run(ask_later()),
        "chat usage": usage(whole),
        "chat usage/stream": usage(events[-1].response),
        "tools": calls(called),
        "tools/stream": calls(called_in_a_stream),
        "result": client.responses.create(input=turns, **tools).output_text,
        "structured": parsed.output_parsed.city,
        "unknown model": answer(lambda: client.responses.create(input=question.prompt, **options | {"model": "no"})),
        "long prompt": answer(lambda: client.responses.create(input=question.long_prompt, **options)),
    }


def usage(response: Any) -> list[int]:
    return [response.usage.input_tokens, response.usage.output_tokens]


def calls(response: Any) -> list[list[object]]:
    found = [item for item in response.output if item.type == "function_call"]
    return [[item.name, json.loads(item.arguments)] for item in found]


if __name__ == "__main__":
    Question.answer_with(ask)
