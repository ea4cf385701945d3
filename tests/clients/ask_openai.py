"""OpenAI's own client, with strict validation of what it is sent.

Only streams of completions are read by a lenient client: OpenAI sends a null finish_reason in them, as Quire does, but
its client's types do not allow that.
"""

import asyncio
import json
from typing import Any

import openai
from question import WEATHER, Place, Question, answer

STRICT: dict[str, Any] = {"max_retries": 0, "_strict_response_validation": True}
NULL = {
    "completion": ("system_fingerprint", "service_tier", "kv_transfer_params"),
    "chat": ("system_fingerprint", "service_tier", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"),
}


def ask(question: Question) -> dict[str, object]:
    client = openai.OpenAI(base_url=question.url, api_key=question.key, **STRICT)
    lenient = openai.OpenAI(base_url=question.url, api_key=question.key, max_retries=0)
    options: dict[str, Any] = {"model": question.model, "max_tokens": question.tokens, "temperature": 0}
    messages: Any = question.messages
    chat = client.chat.completions.create(messages=messages, **options)
    completion = client.completions.create(prompt=question.prompt, **options)
    both = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(messages=messages, **options, **both)
    *texts, last_text = lenient.completions.create(prompt=question.prompt, **options, **both)
    later, later_in_a_stream = asyncio.run(ask_later(question))

    tools: dict[str, Any] = {**options, "max_tokens": 120, "tools": [{"type": "function", "function": WEATHER}]}
    turns: list[Any] = [{"role": "user", "content": question.weather}]
    called = client.chat.completions.create(messages=turns, **tools)
    with client.chat.completions.stream(messages=turns, **tools) as stream:
        called_in_a_stream = stream.get_final_completion()
    message = called.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": question.sky}
    told = client.chat.completions.create(messages=[*turns, message, result], **tools)
    parsed = client.chat.completions.parse(messages=messages, response_format=Place, **options)
    dumps = {"chat": chat.model_dump(), "completion": completion.model_dump()}
    return {
        "chat": chat.choices[0].message.content,
        "chat/stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "chat/async": later,
        "chat/async stream": later_in_a_stream,
        "completion": completion.choices[0].text,
        "completion/stream": "".join(chunk.choices[0].text for chunk in texts),
        "chat usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens],
        "chat usage/stream": [last.usage.prompt_tokens, last.usage.completion_tokens],
        "completion usage/stream": [last_text.usage.prompt_tokens, last_text.usage.completion_tokens],
        "tools": calls(called),
        "tools/stream": calls(called_in_a_stream),
        "result": told.choices[0].message.content,
        "structured": parsed.choices[0].message.parsed.city,
        "models": [model.id for model in client.models.list()],
        "unknown model": answer(lambda: client.chat.completions.create(messages=messages, **options | {"model": "no"})),
        "long prompt": answer(lambda: client.completions.create(prompt=question.long_prompt, **options)),
        "keys that are not null": [
            f"{k}.{n}" for k, names in NULL.items() for n in names if dumps[k].get(n, 0) is not None
        ],
    }


def calls(completion: Any) -> list[list[object]]:
    found = completion.choices[0].message.tool_calls
    return [[call.function.name, json.loads(call.function.arguments)] for call in found]


async def ask_later(question: Question) -> tuple[str, str]:
    """The same chat at once and in a stream, at the same time."""
    options: dict[str, Any] = {"model": question.model, "max_tokens": question.tokens, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=question.url, api_key=question.key, **STRICT) as client:

        async def stream() -> str:
            chunks = await client.chat.completions.create(messages=question.messages, stream=True, **options)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        whole, text = await asyncio.gather(
            client.chat.completions.create(messages=question.messages, **options), stream()
        )
    return whole.choices[0].message.content, text


if __name__ == "__main__":
    Question.answer_with(ask)
