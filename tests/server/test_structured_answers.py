"""Answers that must be JSON, calls of tools, or any other given form: every field, over HTTP, whole and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from support.chats import WEATHER, calls_of, message_of
from support.server import Service

QUESTION = [{"role": "user", "content": "Who is it?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Kit", "Tim", "Max"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "friends": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}, "hours": {"type": "integer", "minimum": 1, "maximum": 24}},
            "required": ["zone", "hours"],
            "additionalProperties": False,
        },
    },
}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
PATHS = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
WARM = {"temperature": 1.3, "seed": 5}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": QUESTION} if "chat" in path else {"prompt": "It is"}
    return {**prompt, "max_tokens": 150, "temperature": 0, **fields}


def texts(server: Service, path: str, **fields: Any) -> list[str]:
    """The text of each choice. It must have ended by itself."""
    answer = server.post(path, body_for(path, **fields))
    assert answer.status == 200, answer.body
    found: dict[int, str] = {}
    ends = []
    for event in answer.events if fields.get("stream") else [answer.json]:
        for choice in event["choices"]:
            part = choice.get("delta") or choice.get("message") or choice
            found[choice["index"]] = found.get(choice["index"], "") + (part.get("content") or part.get("text") or "")
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert ends == ["stop"] * len(found)
    return [found[index] for index in sorted(found)]


def chat(server: Service, **fields: Any) -> Any:
    body = {**body_for("/v1/chat/completions"), **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.events if fields.get("stream") else answer.json


@pytest.mark.sampled(2)
@STREAMS
@PATHS
@pytest.mark.parametrize("strict", [None, False, True])
def test_a_json_schema_always_holds(server, path, stream, strict):
    schema = {"name": "person", "schema": PERSON, **({} if strict is None else {"strict": strict})}
    fields = {"response_format": {"type": "json_schema", "json_schema": schema}, "stream": stream}
    for text in [*texts(server, path, **fields), *texts(server, path, **fields, **WARM, n=3)]:
        jsonschema.validate(json.loads(text), PERSON)


@STREAMS
def test_json_that_looks_like_a_call_is_content_for_a_request_that_demands_it(server, stream):
    said = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    message = message_of(chat(server, tools=[TIME], structured_outputs={"choice": [said]}, stream=stream))
    assert message == {"content": said, "reasoning": None, "tool_calls": [], "finish_reason": "stop"}


@PATHS
def test_a_json_object_is_one(server, path):
    brace, quote = (server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json for text in '}"')
    bias = {str(brace["tokens"][-1]): 30, str(quote["tokens"][-1]): 60}  # so that texts end soon
    fields = {"response_format": {"type": "json_object"}, "logit_bias": bias}
    for text in texts(server, path, **fields, **WARM, n=4):
        assert isinstance(json.loads(text), dict)


@pytest.mark.sampled(2)
@STREAMS
@PATHS
@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("structured_outputs", {"choice": ["red", "green"]}, "red|green"),
        ("structured_outputs", {"regex": r"[a-c]{3}-\d\d"}, r"[a-c]{3}-\d\d"),
        ("structured_outputs", {"grammar": 'start: "x" ("y" | "z")'}, "x[yz]"),
        ("structured_outputs", {"json": {"enum": [1, 2]}}, "[12]"),
        ("guided_choice", ["red", "green"], "red|green"),
        ("guided_regex", "[ab]{5}", "[ab]{5}"),
        ("guided_grammar", 'start: "x" ("y" | "z")', "x[yz]"),
        ("guided_json", {"enum": [True]}, "true"),
    ],
)
def test_the_text_has_the_form_that_was_asked_for(server, path, stream, field, value, pattern):
    [text] = texts(server, path, **{field: value}, stream=stream)
    assert re.fullmatch(pattern, text)


def test_plain_text_may_be_anything(server):
    plain, asked = (
        message_of(chat(server, max_tokens=8, **fields)) for fields in ({}, {"response_format": {"type": "text"}})
    )
    assert plain == asked


@STREAMS
@PATHS
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "dog"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing_else"}}, "structured_outputs"),
        ({"guided_regex": "[z-a]"}, "structured_outputs"),
    ],
)
def test_a_constraint_that_cannot_be_compiled_is_a_400_that_names_its_field(server, path, stream, fields, param):
    answer = server.post(path, body_for(path, **fields, stream=stream))
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert answer.error["message"].startswith(f"{param}: ")


@STREAMS
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_tools_with_parameters_that_are_no_schema_are_a_400_that_names_them(server, stream, choice):
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "dog"}}}
    body = body_for("/v1/chat/completions", tools=[tool], tool_choice=choice, stream=stream)
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == "tools"


@STREAMS
def test_required_calls_are_made(server, stream):
    for seed in range(3):
        fields = {"tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False}
        message = message_of(chat(server, **fields, stream=stream, temperature=1.3, seed=seed))
        assert message["finish_reason"] == "tool_calls"
        assert message["content"] == (None if stream else "")
        [(name, arguments)] = calls_of(message)
        assert name == "get_time"
        jsonschema.validate(arguments, TIME["function"]["parameters"])


@STREAMS
def test_required_calls_that_are_cut_off_are_not_content(server, stream):
    fields = {"tools": [TIME], "tool_choice": "required", "stream": stream, "return_token_ids": True}
    for max_tokens in (3, 40):
        message = message_of(chat(server, **fields, max_tokens=max_tokens, min_tokens=max_tokens))
        assert not message["content"]
        assert message["finish_reason"] == "length"


@STREAMS
def test_the_tool_that_the_request_names_is_called(server, stream):
    choice = {"type": "function", "function": {"name": "get_time"}}
    message = message_of(chat(server, tools=[WEATHER, TIME], tool_choice=choice, stream=stream, **WARM))
    assert message["finish_reason"] == "stop"  # as OpenAI's
    [(name, arguments)] = calls_of(message)
    assert name == "get_time"
    jsonschema.validate(arguments, TIME["function"]["parameters"])


@STREAMS
def test_each_of_n_answers_makes_its_required_calls_with_logprobs(server, stream):
    fields = {"tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False, "n": 3, "logprobs": True}
    answer = chat(server, **fields, **WARM, stream=stream)
    for index in range(3):
        [(_, arguments)] = calls_of(message_of(answer, index))
        jsonschema.validate(arguments, TIME["function"]["parameters"])
    events = answer if stream else [answer]
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    said = json.loads(bytes(byte for entry in entries for byte in entry["bytes"]).decode().removesuffix("<|im_end|>"))
    assert [call["name"] for call in said] == ["get_time"]


OPEN = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"


@STREAMS
def test_the_form_is_that_of_the_answer_behind_the_thinking(speaker, stream):
    thought = "Is it a <tool_call>? No.</think>"  # a call does not end the thinking here: the form waits for its end
    tokens = speaker.post("/tokenize", {"prompt": thought, "add_special_tokens": False}).json["tokens"]
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    fields = {"chat_template": OPEN, "response_format": format, "vllm_xargs": {"say": tokens}}
    message = message_of(chat(speaker, **fields, stream=stream))
    assert message["reasoning"] == "Is it a <tool_call>? No."
    jsonschema.validate(json.loads(message["content"]), PERSON)


@STREAMS
def test_thinking_ends_when_its_budget_is_used_up(speaker, stream):
    fields = {"chat_template": OPEN, "thinking_token_budget": 5, "stream": stream, "return_token_ids": True}
    answer = chat(speaker, **fields, vllm_xargs={"say": []}, structured_outputs={"choice": ["yes", "no"]})
    message = message_of(answer)
    assert message["content"] in ("yes", "no")
    choices = [choice for event in answer for choice in event["choices"]] if stream else answer["choices"]
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
    end = speaker.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json["tokens"]
    assert token_ids[5 : 5 + len(end)] == end
    assert speaker.post("/detokenize", {"tokens": token_ids[:5]}).json["prompt"].strip() == message["reasoning"].strip()


def test_a_budget_for_thinking_needs_a_model_that_thinks(server):
    answer = server.post("/v1/chat/completions", {"messages": QUESTION, "thinking_token_budget": 5})
    assert answer.status == 400
    assert answer.error["param"] == "thinking_token_budget"
