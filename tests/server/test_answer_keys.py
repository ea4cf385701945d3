"""The keys of answers are those of vLLM 0.33, of Open Responses and of Anthropic, null where there is nothing to say:
typed clients need them."""

from __future__ import annotations

import json

import pytest

MESSAGES = [{"role": "user", "content": "Tell me a story about a dog."}]
CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

ANSWER = set("id object created model choices service_tier system_fingerprint usage".split())
TRANSFER = {"kv_transfer_params", "ec_transfer_params", "metrics"}
USAGE = {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"}
CHOICE = {"index", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts", "weight_versions"}
CHUNK = {"id", "object", "created", "model", "choices", "usage"}


def nulls(value) -> set[str]:
    return {name for name, item in value.items() if item is None}


def test_a_completion_has_vllms_keys(server):
    answer = server.post("/v1/completions", COMPLETION).json
    assert answer.keys() == ANSWER | TRANSFER
    assert nulls(answer) == {"service_tier", "system_fingerprint"} | TRANSFER
    [choice] = answer["choices"]
    assert choice.keys() == CHOICE | {"text", "prompt_logprobs", "prompt_token_ids"}
    assert nulls(choice) == choice.keys() - {"index", "text", "finish_reason"}
    assert answer["usage"].keys() == USAGE | {"completion_tokens_details"}
    assert nulls(answer["usage"]) == {"completion_tokens_details"}


def test_a_chat_has_vllms_keys(server):
    answer = server.post("/v1/chat/completions", CHAT).json
    of_prompt = {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
    assert answer.keys() == ANSWER | TRANSFER | of_prompt
    assert nulls(answer) == {"service_tier", "system_fingerprint"} | TRANSFER | of_prompt
    [choice] = answer["choices"]
    assert choice.keys() == CHOICE | {"message"}
    assert nulls(choice) == choice.keys() - {"index", "message", "finish_reason"}
    message = choice["message"]
    assert message.keys() == set("role content refusal annotations audio function_call reasoning".split())
    assert nulls(message) == message.keys() - {"role", "content"}


def test_chunks_of_a_completion_have_vllms_keys(server):
    [*events, last] = server.post("/v1/completions", {**COMPLETION, **STREAM}).events
    for event in events:
        assert event.keys() == CHUNK
        [choice] = event["choices"]
        assert choice.keys() == set("index text logprobs finish_reason stop_reason prompt_token_ids token_ids".split())
    assert last.keys() == CHUNK
    assert last["usage"].keys() == USAGE


def test_chunks_of_a_chat_have_vllms_keys(server):
    [first, *events, last] = server.post("/v1/chat/completions", {**CHAT, **STREAM}).events
    assert first.keys() == CHUNK | {"prompt_token_ids", "prompt_text"}
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    for event in events:
        assert event.keys() == CHUNK
        [choice] = event["choices"]
        ending = {"stop_reason"} if choice["finish_reason"] else set()
        assert choice.keys() == set("index delta logprobs finish_reason token_ids".split()) | ending
        assert choice["delta"].keys() == {"content"}
    assert last.keys() == CHUNK


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_the_prompt_is_returned_if_asked_for(server, stream):
    answer = server.post("/v1/chat/completions", {**CHAT, "return_prompt_text": True, "stream": stream})
    first, *rest = answer.events if stream else [answer.json]
    tokens = server.post("/tokenize", {"messages": MESSAGES}).json["tokens"]
    assert first["prompt_text"] == server.post("/detokenize", {"tokens": tokens}).json["prompt"]
    assert not any("prompt_text" in event for event in rest)


RESPONSE = set(
    """id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key""".split()
)
ECHOED = {
    "max_tool_calls": 3,
    "prompt_cache_key": "a",
    "safety_identifier": "b",
    "service_tier": "flex",
    "presence_penalty": 0.5,
    "frequency_penalty": 1.5,
}


def test_a_response_has_the_keys_of_open_responses(server):
    body = {"input": "Hello!", "max_output_tokens": 1}
    answer = server.post("/v1/responses", body).json
    assert answer.keys() >= RESPONSE
    assert {name: answer[name] for name in ECHOED} == {
        **dict.fromkeys(("max_tool_calls", "prompt_cache_key", "safety_identifier")),
        "service_tier": "auto",
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }
    answer = server.post("/v1/responses", {**body, **ECHOED}).json
    assert {name: answer[name] for name in ECHOED} == ECHOED


def test_the_tools_of_a_response_have_all_keys(server):
    bare = {"type": "function", "name": "f"}
    full = {**bare, "description": "A tool.", "parameters": {"type": "object"}, "strict": True}
    custom = {"type": "custom", "name": "g"}
    answer = server.post("/v1/responses", {"input": "Hello!", "max_output_tokens": 1, "tools": [bare, full, custom]})
    assert answer.json["tools"] == [{**bare, "description": None, "parameters": None, "strict": None}, full, custom]


MESSAGE = set("id type role content model stop_reason stop_sequence stop_details usage container".split())
MESSAGE_USAGE = set(
    """cache_creation cache_creation_input_tokens cache_read_input_tokens inference_geo input_tokens output_tokens
    output_tokens_details server_tool_use service_tier""".split()
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_anthropics_keys(server, stream):
    answer = server.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "stream": stream})
    if stream:
        lines = answer.body.decode().splitlines()
        data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        events = {event["type"]: event for event in data}
        message, block = events["message_start"]["message"], events["content_block_start"]["content_block"]
        usages = [message["usage"], events["message_delta"]["usage"]]
    else:
        message, block = answer.json, answer.json["content"][0]
        usages = [message["usage"]]
    assert message.keys() == MESSAGE
    assert all(usage.keys() == MESSAGE_USAGE for usage in usages)
    assert block.keys() == {"type", "text", "citations"}


def test_an_answer_of_anthropics_api_can_be_sent_back(server):
    body = {"messages": MESSAGES, "max_tokens": 4}
    content = server.post("/v1/messages", body).json["content"]
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}, "caller": {"type": "direct"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
    turns = [{"role": "assistant", "content": [*content, call]}, {"role": "user", "content": [result]}]
    assert server.post("/v1/messages", {**body, "messages": MESSAGES + turns}).status == 200
