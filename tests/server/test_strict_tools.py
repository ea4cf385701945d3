"""Strict tools over HTTP: calls in the model's own format fit their schemas, with each tool_choice and in each API."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from support.chats import WEATHER, joined
from support.server import Host, Service

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
PLACES = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lima"]}, "days": {"type": "integer"}}}
PLACES |= {"required": ["city", "days"], "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def tool(strict: bool | None = True) -> dict[str, Any]:
    found = deepcopy(WEATHER)
    found["function"]["parameters"] = PLACES
    return found if strict is None else {**found, "function": {**found["function"], "strict": strict}}


@pytest.fixture(scope="module")
def service(host: Host) -> Service:
    return host.serve(tool_call_parser="hermes")


def check(message: dict[str, Any]) -> None:
    assert message["content"] in (None, "")
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert (call["function"]["name"], arguments.keys()) == ("get_weather", {"city", "days"})
        assert arguments["city"] in ("Oslo", "Lima")
        assert isinstance(arguments["days"], int)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_fit_their_schema(service, choice, stream):
    body = {"messages": QUESTION, "tools": [tool()], "tool_choice": choice, "max_tokens": 120, "temperature": 0}
    answer = service.post("/v1/chat/completions", {**body, "parallel_tool_calls": False, "stream": stream})
    if stream:
        message = joined(answer.events)
        message = message[0] if isinstance(message, tuple) else message
    else:
        message = answer.json["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    check(message)


@pytest.mark.parametrize("level", ["auto", "function", "parameter"])
def test_levels(host, level):
    service = host.serve(tool_call_parser="hermes", tool_strict_level=level)
    body = {"messages": QUESTION, "tools": [tool(None)], "tool_choice": "required", "max_tokens": 120, "temperature": 0}
    answer = service.post("/v1/chat/completions", {**body, "parallel_tool_calls": False})
    check(answer.json["choices"][0]["message"])
    auto = service.post("/v1/chat/completions", {**body, "tool_choice": "auto", "max_tokens": 8})
    assert auto.status == 200


def test_other_apis_have_strict_tools(service):
    function = tool()["function"]
    flat = {"type": "function", **function}
    body = {"input": "Weather?", "tools": [flat], "tool_choice": "required", "max_output_tokens": 120, "temperature": 0}
    answer = service.post("/v1/responses", {**body, "parallel_tool_calls": False}).json
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    check({"content": None, "tool_calls": [{"function": call}]})
    mine = {"name": "get_weather", "input_schema": PLACES, "strict": True}
    body = {"messages": QUESTION, "tools": [mine], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    answer = service.post("/v1/messages", {**body, "max_tokens": 120, "temperature": 0}).json
    (block,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert block["input"]["city"] in ("Oslo", "Lima")


def test_a_schema_that_cannot_be_enforced_is_named(service):
    wrong = tool()
    wrong["function"]["parameters"] = {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "unheard-of"}},
    }
    body = {"messages": QUESTION, "tools": [wrong], "max_tokens": 4}
    answer = service.post("/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "unheard-of" in answer.error["message"]
