"""Anthropic's own client."""

import asyncio
from typing import Any

import anthropic
from question import WEATHER, Place, Question, answer


def ask(question: Question) -> dict[str, object]:
    address: dict[str, Any] = {"base_url": question.host, "api_key": question.key, "max_retries": 0}
    client = anthropic.Anthropic(**address, _strict_response_validation=True)
    options: dict[str, Any] = {"model": question.model, "max_tokens": question.tokens, "extra_body": {"temperature": 0}}
    messages: Any = question.messages
    whole = client.messages.create(messages=messages, **options)
    with client.messages.stream(messages=messages, **options) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()

    async def ask_later() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(**address) as client:
            later = await client.messages.create(messages=messages, **options)
            async with client.messages.stream(messages=messages, **options) as stream:
                return later.content[0].text, "".join([text async for text in stream.text_stream])

    later, later_in_a_stream = asyncio.run(ask_later())

    schema = WEATHER["parameters"]
    tool = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": schema}
    turns: list[Any] = [{"role": "user", "content": question.weather}]
    tools: dict[str, Any] = {**options, "max_tokens": 120, "tools": [tool]}
    called = client.messages.create(messages=turns, **tools)
    with client.messages.stream(messages=turns, **tools) as stream:
        called_in_a_stream = stream.get_final_message()
    result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": question.sky}
    turns += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    parsed = client.messages.parse(messages=messages, output_format=Place, **options)
    return {
        "chat": whole.content[0].text,
        "chat/stream": text,
        "chat/async": later,
        "chat/async stream": later_in_a_stream,
        "chat usage": usage(whole),
        "chat usage/stream": usage(streamed),
        "tools": calls(called),
        "tools/stream": calls(called_in_a_stream),
        "result": client.messages.create(messages=turns, **tools).content[0].text,
        "structured": parsed.parsed_output.city,
        "models": [model.id for model in client.models.list()],
        "unknown model": answer(lambda: client.messages.create(messages=messages, **options | {"model": "no"})),
        "long prompt": answer(
            lambda: client.messages.create(messages=[{"role": "user", "content": question.long_prompt}], **options)
        ),
    }


def usage(message: anthropic.types.Message) -> list[int]:
    counts = message.usage
    return [counts.input_tokens + (counts.cache_read_input_tokens or 0), counts.output_tokens]


def calls(message: anthropic.types.Message) -> list[list[object]]:
    return [[block.name, block.input] for block in message.content if block.type == "tool_use"]


if __name__ == "__main__":
    Question.answer_with(ask)
