"""Anthropic's client, in an environment of its own, against a live server."""

from __future__ import annotations

import json

import pytest

from support.client_environment import clients_python, run_client
from support.server import Host, Service

pytestmark = pytest.mark.slow

QUESTION = "Tell me a story about a dog."
WEATHER = "What is the weather in Paris?"
KEY = "secret"

ANTHROPIC = """
import json, sys
from anthropic import Anthropic, APIStatusError, AsyncAnthropic
import asyncio

url, question, weather, key = sys.argv[1:]
client = Anthropic(base_url=url, api_key=key, max_retries=0)
body = dict(model="demo", max_tokens=24, system="Be brief.", messages=[{"role": "user", "content": question}],
            extra_body={"temperature": 0})
whole = client.messages.create(**body)
with client.messages.stream(**body) as stream:
    pieces = list(stream.text_stream)
    streamed = stream.get_final_message()

async def asynchronously():
    async with AsyncAnthropic(base_url=url, api_key=key) as other:
        return await other.messages.create(**body)

schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": schema}
turns = [{"role": "user", "content": weather}]
call = dict(model="demo", max_tokens=120, tools=[tool], extra_body={"temperature": 0})
with client.messages.stream(messages=turns, **call) as stream:
    called = stream.get_final_message()
result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": '{"temperature": 21, "sky": "sunny"}'}
turns += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
told = client.messages.create(messages=turns, **call)

counted = client.messages.count_tokens(**{name: body[name] for name in ("model", "system", "messages")})
try:
    client.messages.create(**{**body, "max_tokens": 0})
except APIStatusError as error:
    refused = [type(error).__name__, error.status_code, error.body["error"]["type"]]
print(json.dumps({
    "texts": [whole.content[0].text, streamed.content[0].text, "".join(pieces),
              asyncio.run(asynchronously()).content[0].text],
    "reasons": [whole.stop_reason, streamed.stop_reason],
    "counted": [counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens],
    "output": [whole.usage.output_tokens, streamed.usage.output_tokens],
    "refused": refused,
    "called": [called.stop_reason, called.content[0].name, called.content[0].input],
    "told": told.content[0].text,
    "models": [[model.id, model.display_name, model.type] for model in client.models.list()],
    "long": client.messages.create(**{**body, "max_tokens": 8192, "stop_sequences": [" "]}).stop_reason,
    "beta": client.beta.messages.create(**body, betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}).content[0].text,
}))
"""


def expected(server: Service, system: str | None = None) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    body = {"messages": [*messages, {"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    return server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]


def test_the_anthropic_package_works(host: Host, server: Service):
    guarded = host.serve(api_key=[KEY])
    python = clients_python()
    result = json.loads(run_client(python, ANTHROPIC, guarded.url, QUESTION, WEATHER, KEY))
    assert result["texts"] == [expected(server, "Be brief.")] * 4
    assert result["reasons"] == ["max_tokens"] * 2
    assert result["counted"][0] == result["counted"][1]
    assert result["output"] == [24, 24]
    assert result["refused"] == ["BadRequestError", 400, "invalid_request_error"]
    assert result["called"] == ["tool_use", "get_weather", {"city": "Paris"}]
    assert "sunny" in result["told"]
    assert result["models"] == [["demo", "demo", "model"]]
    assert result["long"] == "stop_sequence"
    assert result["beta"] == expected(server, "Be brief.")
