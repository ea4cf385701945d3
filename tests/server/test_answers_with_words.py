"""Structured answers and calls of tools with words that make sense: SmolLM2-135M-Instruct over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.chats import WEATHER, calls_of, message_of
from support.server import Answer, request
from support.server_process import Server
from support.smollm2 import smollm2

pytestmark = pytest.mark.slow

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(str(smollm2()), *"--kv-cache-memory-bytes 256M --max-model-len 2048".split()) as server:
        yield server


def post(server: Server, question: str, **fields: Any) -> Answer:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200, **fields}
    headers = {"Content-Type": "application/json"}
    return request(server.url, "POST", "/v1/chat/completions", json.dumps(body).encode(), **headers)


def ask(server: Server, question: str, **fields: Any) -> dict[str, Any]:
    answer = post(server, question, **fields)
    assert answer.status == 200, answer.body
    return message_of(answer.events if fields.get("stream") else answer.json)


def schema_of(**properties: str) -> dict[str, Any]:
    fields = {name: {"type": kind} for name, kind in properties.items()}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@STREAMS
def test_facts_are_put_into_the_schema(server, stream):
    text = "Extract the person: Anna is 34 years old and lives in Rome."
    format = schema_of(name="string", age="integer", city="string")
    message = ask(server, text, response_format=format, stream=stream)
    assert json.loads(message["content"]) == {"name": "Anna", "age": 34, "city": "Rome"}
    message = ask(server, "What is the capital of France? Answer in JSON.", response_format=schema_of(capital="string"))
    assert json.loads(message["content"]) == {"capital": "Paris"}


@STREAMS
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_be_made_has_the_arguments_of_the_question(server, stream, choice):
    tool = {"type": "function", "function": {**WEATHER["function"]}}
    tool["function"]["parameters"] = {**tool["function"]["parameters"], "additionalProperties": False}
    fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "stream": stream}
    assert calls_of(ask(server, "What is the weather in Paris?", **fields)) == [("get_weather", {"city": "Paris"})]


def test_a_model_whose_template_knows_no_calls_is_not_asked_to_decide(server):
    answer = post(server, "What is the weather in Paris?", tools=[WEATHER])
    assert answer.status == 400
    assert answer.error["param"] == "tools"
