"""functions and function_call, the older form of tools, with OpenAI's client."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from support.server import Service

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def ask(server: Service, stream: bool, **fields):
    """(content, function_call, finish reason)"""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body = {"model": "demo", "temperature": 0, "max_tokens": 100, "messages": [QUESTION], **fields}
    if not stream:
        [choice] = client.chat.completions.create(**body).choices
        assert choice.message.tool_calls is None
        call = choice.message.function_call
        return choice.message.content, call and call.to_dict(), choice.finish_reason
    content, call, reason = "", {}, None
    for chunk in client.chat.completions.create(**body, stream=True):
        [choice] = chunk.choices
        assert choice.delta.tool_calls is None
        content += choice.delta.content or ""
        for key, text in (choice.delta.function_call.to_dict() if choice.delta.function_call else {}).items():
            call[key] = call.get(key, "") + text
        reason = choice.finish_reason or reason
    return content or None, call or None, reason


@STREAMS
def test_a_function_is_called_and_its_result_is_read(server, stream):
    content, call, reason = ask(server, stream, functions=[WEATHER])
    assert (content, reason) == (None, "function_call")
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
    result = {"role": "function", "name": "get_weather", "content": '{"temperature": 21, "sky": "sunny"}'}
    turn = {"role": "assistant", "content": None, "function_call": call}
    content, call, reason = ask(server, stream, messages=[QUESTION, turn, result], functions=[WEATHER])
    assert "sunny" in content
    assert (call, reason) == (None, "stop")


def test_the_prompt_is_that_of_tools(server):
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    old = [
        QUESTION,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "get_weather", "content": "sunny"},
    ]
    new = [
        QUESTION,
        {"role": "assistant", "tool_calls": [{"id": "call00001", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": WEATHER}]
    body = {"max_tokens": 1, "return_prompt_text": True}
    prompts = [
        server.post("/v1/chat/completions", {**body, **fields}).json["prompt_text"]
        for fields in ({"messages": old, "functions": [WEATHER]}, {"messages": new, "tools": tools})
    ]
    assert prompts[0] == prompts[1]


@STREAMS
def test_function_call_forces_and_forbids(server, stream):
    other = {**WEATHER, "name": "get_time"}
    content, call, reason = ask(server, stream, functions=[WEATHER, other], function_call={"name": "get_time"})
    assert (content or None, call["name"], reason) == (None, "get_time", "stop")  # "" in a whole answer, as in vLLM
    content, call, _ = ask(server, stream, functions=[WEATHER], function_call="none")
    assert content
    assert call is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [WEATHER], "function_call": {"name": "other"}}, "function_call"),
        ({"functions": [WEATHER], "tools": [{"type": "function", "function": WEATHER}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"messages": [QUESTION, {"role": "assistant", "function_call": {"name": "a"}}]}, "messages"),
        (
            {
                "tools": [{"type": "function", "function": WEATHER}],
                "structured_outputs": {"regex": "a"},
                "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            },
            "structured_outputs",
        ),
    ],
)
def test_a_wrong_field_is_named(server, fields, param):
    answer = server.post("/v1/chat/completions", {"messages": [QUESTION], **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.error
