"""Errors name what would be accepted in the words of JSON, and not those of Python or of the code."""

from __future__ import annotations

import pytest

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


def blocks(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}], "max_tokens": 1}


CASES = [  # path, body, the message
    ("/v1/chat/completions", {**CHAT, "response_format": "json"}, "response_format: Input should be an object"),
    (
        "/v1/chat/completions",
        {**CHAT, "tool_choice": "some"},
        "tool_choice: Input should be 'none', 'auto' or 'required' or Input should be an object",
    ),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 1e300}, "max_tokens: Input should be an integer with fewer digits"),
    ("/v1/responses", {"input": "a", "reasoning": "high"}, "reasoning: Input should be an object"),
    (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema"}}},
        "text.format.schema: Field required",
    ),
    ("/v1/responses", {"input": "a", "prompt_cache_key": 5}, "prompt_cache_key: Input should be a valid string"),
    ("/v1/messages", {**CHAT, "tool_choice": "auto"}, "tool_choice: Input should be an object"),
    ("/v1/messages", {**CHAT, "thinking": True}, "thinking: Input should be an object"),
    (
        "/v1/messages",
        blocks({"type": "x"}),
        "messages[0].content[0]: Only blocks of these types are supported: text, image, document, search_result, "
        "tool_reference, compaction, thinking, tool_use, tool_result",
    ),
    (
        "/v1/messages",
        blocks({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "x"}]}),
        "messages[0].content[0].content[0]: Only blocks of these types are supported: text, image, document, "
        "search_result, tool_reference, compaction",
    ),
    ("/api/chat", {"model": "demo", "messages": [], "options": 5}, "options: Input should be an object"),
]


@pytest.mark.parametrize(("path", "body", "message"), CASES)
def test_an_error_says_what_would_be_accepted(server, path, body, message):
    answer = server.post(path, body)
    error = answer.json["error"]
    assert (answer.status, error if isinstance(error, str) else error["message"]) == (400, message)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_an_empty_body_is_called_empty(server, path):
    answer = server.request("POST", path, b"", Content_Type="application/json")
    assert (answer.status, "the body is empty; it should be a JSON object" in str(answer.json)) == (400, True)


def test_too_many_logprobs_of_a_chat_are_the_fault_of_top_logprobs(server):
    answer = server.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21})
    assert (answer.status, answer.error["param"]) == (400, "top_logprobs")


def test_conversations_cannot_be_compacted(server):
    answer = server.post("/v1/responses/compact", {"model": "demo", "input": "a"})
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert "truncation" in answer.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_for_thinking_is_accepted_by_a_model_that_does_not_think(server, stream):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert server.post("/v1/messages", {**CHAT, "thinking": thinking, "stream": stream}).status == 200
