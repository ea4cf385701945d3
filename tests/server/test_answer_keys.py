"""The keys of answers are those of vLLM 0.33, null where there is nothing to say: typed clients need them."""

from __future__ import annotations

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
