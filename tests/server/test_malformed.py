"""Everything that can be wrong with a request: each is answered with a 4xx that names the field, and leaves nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.server import Service, eventually

COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
BODIES = {"completions": COMPLETION, "chat/completions": CHAT}
USER = {"role": "user", "content": "a"}
HUGE = 10**30

# Of both endpoints: field, value that is wrong, and the param if it is not the field.
BOTH: list[tuple[Any, ...]] = [
    ("n", 0),
    ("n", -1),
    ("n", 1.5),
    ("n", "one"),
    ("n", False),
    ("n", [1]),
    ("n", HUGE),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", ""),
    ("temperature", "nan"),
    ("temperature", "-1"),
    ("temperature", [1]),
    ("temperature", {}),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", "1.5"),
    ("top_k", -2),
    ("top_k", 0.5),
    ("top_k", HUGE),
    ("min_p", -0.1),
    ("min_p", 2),
    ("presence_penalty", 2.1),
    ("presence_penalty", -3),
    ("frequency_penalty", 5),
    ("frequency_penalty", "x"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("seed", "one"),
    ("seed", "1.5"),
    ("seed", 1.5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 5], "stop[1]"),
    ("stop", {"a": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids", ["a"], "stop_token_ids[0]"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", [1, HUGE], "stop_token_ids[1]"),
    ("stop_token_ids", [1, "b"], "stop_token_ids[1]"),
    ("max_tokens", -1),
    ("max_tokens", "ten"),
    ("max_tokens", "-1"),
    ("max_tokens", 1.5),
    ("max_tokens", HUGE),
    ("max_tokens", 2049),
    ("max_tokens", False),
    ("min_tokens", -1),
    ("min_tokens", 2),  # more than max_tokens
    ("min_tokens", HUGE),
    ("ignore_eos", "perhaps"),
    ("ignore_eos", 2),
    ("stream", "streaming"),
    ("stream", 0.5),
    ("stream_options", {}),  # without stream
    ("stream_options", 5),
    ("stream_options", {"include_usage": "x"}, "stream_options.include_usage"),
    ("logit_bias", []),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", {"9" * 40: 1}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [999999]),
    ("allowed_token_ids", "1"),
    ("bad_words", "a"),
    ("bad_words", [""]),
    ("bad_words", [1], "bad_words[0]"),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", HUGE),
    ("prompt_logprobs", "all"),
    ("prompt_logprobs", "2"),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", 2049),
    ("truncate_prompt_tokens", 99999),
    ("logprob_token_ids", [1]),  # without logprobs
    ("logprob_token_ids", []),
    ("logprob_token_ids", ["a"], "logprob_token_ids[0]"),
    ("stream_interval", 0),
    ("stream_interval", "often"),
    ("kv_compression", {"ratio": 2}),  # the server does not compress
    ("kv_compression", "half"),
    ("kv_compression", {"ratio": 0.5}, "kv_compression.ratio"),
    ("kv_compression", {"budget": 100}, "kv_compression.ratio"),
    ("repetition_detection", []),
    ("repetition_detection", {"max_pattern_size": 5, "min_count": 1}),
    ("repetition_detection", {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}),
    ("repetition_detection", {"max_pattern_size": 10**6, "min_count": 2}),
    ("repetition_detection", {"max_pattern_size": -1}, "repetition_detection.max_pattern_size"),
    ("repetition_detection", {"max_size": 1}, "repetition_detection.max_size"),
    ("truncation_side", "middle"),
    ("truncation_side", ["left"]),
    ("add_special_tokens", "none"),
    ("skip_special_tokens", 5),
    ("spaces_between_special_tokens", "x"),
    ("include_stop_str_in_output", []),
    ("priority", "high"),
    ("priority", HUGE),
    ("priority", 1),  # the server's policy is first come first served
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("return_token_ids", "x"),
    ("request_id", "a b"),
    ("request_id", ""),
    ("request_id", "x" * 1000),
    ("vllm_xargs", [1]),
    ("vllm_xargs", {"x": HUGE}),
    ("user", 5),
    ("model", 5),
    ("model", "gpt-4"),
    ("response_format", "json"),
    ("response_format", {}, "response_format.type"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}, "response_format.json_schema.schema"),
    ("structured_outputs", "a+"),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"regex": 5}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"pattern": "a"}),
    ("guided_json", "{", "structured_outputs"),
    ("guided_regex", 5, "structured_outputs"),
    ("guided_choice", ["a", 5], "structured_outputs"),
    ("guided_grammar", ["a"], "structured_outputs"),
    ("use_beam_search", "perhaps"),
    ("length_penalty", "long"),
]
OF_COMPLETIONS: list[tuple[Any, ...]] = [
    ("prompt", None),
    ("prompt", 5),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", {}),
    ("prompt", True),
    ("prompt", [True]),
    ("prompt", [1.5]),
    ("prompt", [1, "a"]),
    ("prompt", ["a", ""]),
    ("prompt", ["a", None]),
    ("prompt", [[]]),
    ("prompt", [[1], "a"]),
    ("prompt", [[1], [True]]),
    ("prompt", [[[1]]]),
    ("prompt", [-1]),
    ("prompt", [99999]),
    ("prompt", [HUGE]),
    ("prompt", [[1], [99999]]),
    ("prompt", [5] * 2048),
    ("prompt", "word " * 3000),
    ("prompt", ["a"] * 16385, "n"),
    ("suffix", "end"),
    ("best_of", 0),
    ("best_of", "two"),
    ("logprobs", "all"),
    ("logprobs", -2),
    ("logprobs", 21),
    ("logprobs", "2"),
    ("echo", "loud"),
    ("max_tokens", 0),
]
OF_CHAT: list[tuple[Any, ...]] = [
    ("messages", None),
    ("messages", "hello"),
    ("messages", []),
    ("messages", {}),
    ("messages", ["hello"], "messages[0]"),
    ("messages", [None], "messages[0]"),
    ("messages", [{}], "messages[0].role"),
    ("messages", [{"content": "a"}], "messages[0].role"),
    ("messages", [{"role": None, "content": "a"}], "messages[0].role"),
    ("messages", [{"role": 5, "content": "a"}], "messages[0].role"),
    ("messages", [USER, {"role": "user", "content": 5}], "messages[1].content"),
    ("messages", [{"role": "user", "content": {}}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [5]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": ["a", None]}], "messages[0].content[1]"),
    ("messages", [{"role": "user", "content": [{"type": "refusal", "text": "a"}]}], "messages[0].content[0].refusal"),
    ("messages", [{"role": "user", "content": [{"type": "thinking"}]}], "messages[0].content[0].thinking"),
    ("messages", [{"role": "user", "content": [{"type": "input_text"}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        "messages[0].content[0].image_url",
    ),
    ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].input_audio"),
    ("messages", [{**USER, "name": 5}], "messages[0].name"),
    ("messages", [{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ("messages", [{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    ("messages", [{"role": "tool", "content": "a", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ("messages", [{"role": "user", "content": "word " * 3000}]),
    ("logprobs", 5),
    ("logprobs", "many"),
    ("top_logprobs", 3),  # without logprobs
    ("top_logprobs", "3"),
    ("top_logprobs", "many"),
    ("top_logprobs", -2),
    ("max_completion_tokens", 0),
    ("max_completion_tokens", "five"),
    ("max_completion_tokens", HUGE),
    ("max_tokens", 0),
    ("add_generation_prompt", "perhaps"),
    ("continue_final_message", 5),
    ("chat_template", 5),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", []),
    ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
    ("chat_template_kwargs", {"messages": []}),
    ("documents", "x"),
    ("tools", "x"),
    ("tools", []),
    ("tools", [5], "tools[0]"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [{"type": "function", "function": {"name": 5}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": 5}}], "tools[0].function.parameters"),
    ("tools", [{"type": 5, "function": {"name": "f"}}], "tools[0]"),
    ("tool_choice", "perhaps"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function"}, "tool_choice.function"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", []),
    ("functions", [{"name": 5}], "functions[0].name"),
    ("function_call", "auto"),  # without functions
    ("function_call", "perhaps"),
    ("audio", {"voice": "x"}),
    ("reasoning_effort", 5),
    ("reasoning_effort", "extreme"),
    ("include_reasoning", "perhaps"),
    ("parallel_tool_calls", 5),
]
OF_OTHERS: list[tuple[str, Any, str | None]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "a", "model": "gpt-4"}, "model"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": "x"}, "add_special_tokens"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("/tokenize", {"messages": [USER], "chat_template": "x"}, "chat_template"),
    (
        "/tokenize",
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
    ),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": 5}, "tokens"),
    ("/detokenize", {"tokens": "5"}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": [HUGE]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ("/abort_requests", {}, "request_ids"),
    ("/abort_requests", {"request_ids": []}, "request_ids"),
    ("/abort_requests", {"request_ids": "x"}, "request_ids"),
    ("/abort_requests", {"request_ids": [5]}, "request_ids[0]"),
]
TABLE: list[tuple[str, Any, str | None]] = [
    *(
        (f"/v1/{where}", {**body, case[0]: case[1]}, case[-1] if len(case) == 3 else case[0])
        for where, body in BODIES.items()
        for case in BOTH
    ),
    *(
        ("/v1/completions", {**COMPLETION, case[0]: case[1]}, case[-1] if len(case) == 3 else case[0])
        for case in OF_COMPLETIONS
    ),
    *(
        ("/v1/chat/completions", {**CHAT, case[0]: case[1]}, case[-1] if len(case) == 3 else case[0])
        for case in OF_CHAT
    ),
    *OF_OTHERS,
]

# Bodies that are not even JSON objects.
RAW = {
    "empty": b"",
    "blank": b"  ",
    "text": b"hello",
    "half": b'{"prompt": "a"',
    "trailing": b'{"prompt": "a"} x',
    "comma": b'{"prompt": "a",}',
    "quotes": b"{'prompt': 'a'}",
    "null": b"null",
    "number": b"5",
    "string": b'"a"',
    "array": b"[]",
    "array of objects": b'[{"prompt": "a"}]',
    "utf-8": b'{"prompt": "\xff\xfe"}',
    "cut utf-8": b'{"prompt": "\xe2\x82"}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "lone low surrogate": b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
    "surrogate as bytes": b'{"prompt": "\xed\xa0\x80"}',
    "control character": b'{"prompt": "\x00"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "minus infinity": b'{"prompt": "a", "anything": -Infinity}',
    "deep": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep elsewhere": b'{"prompt": "a", "x": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
    "digits": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "leading zero": b'{"prompt": "a", "seed": 01}',
    "gzip": b"\x1f\x8b\x08\x00",
}
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_requests"]


@pytest.fixture(scope="module", autouse=True)
def _the_server_is_as_before(server: Service):
    yield
    assert server.complete("Once upon a time", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert server.get("/load").json == {"server_load": 0}
    eventually(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0)
    assert server.metric("kv_cache_usage_perc") == 0


def test_there_are_enough_cases():
    assert len({json.dumps(case) for case in TABLE}) == len(TABLE) > 200
    assert {path for path, _, _ in TABLE} == set(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_wrong_fields_are_named(server, path):
    for body, param in [(body, param) for place, body, param in TABLE if place == path]:
        answer = server.post(path, body)
        status = 404 if param == "model" and isinstance(body["model"], str) else 400
        said = (answer.status, answer.error["param"], answer.error["type"])
        assert said == (status, param, "invalid_request_error"), (f"{body}"[:500], answer.body)


@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_json_object_is_refused(server, path):
    for name, body in RAW.items():
        answer = server.request("POST", path, body, Content_Type="application/json")
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), name


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_is_read_as_json_whatever_its_content_type_is(server, kind):
    headers = {} if kind is None else {"Content_Type": kind}
    assert server.request("POST", "/v1/completions", json.dumps(COMPLETION).encode(), **headers).status == 200
    for path in PATHS:
        answer = server.request("POST", path, b"no JSON", **headers)
        assert (answer.status, answer.error["code"]) == (400, "invalid_json"), path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", [*PATHS, "/reset_prefix_cache"])
def test_another_method_is_refused(server, path):
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        answer = server.request(method, path, b"{}", Content_Type="application/json")
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"
        assert answer.error["message"] == f"{method} is not allowed for {path}; use POST"


@pytest.mark.parametrize("path", ["/v1", "/v1/completion", "/v1/chat", "/v1/completions/x", "/%00", "/..%2fetc"])
def test_a_path_that_does_not_exist_is_said_so(server, path):
    for method in ("GET", "POST"):
        answer = server.request(method, path)
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["message"].startswith(f"unknown URL: {method} /")


@pytest.mark.parametrize("where", ["completions", "chat/completions"])
def test_several_greedy_completions_are_refused(server, where):
    body = {**BODIES[where], "n": 2, "temperature": 0}
    assert server.post(f"/v1/{where}", body).error["param"] == "n"


@pytest.mark.parametrize("where", ["completions", "chat/completions"])
def test_a_prompt_without_room_has_openais_code(server, where):
    long = "word " * 3000
    body = {"prompt": long, "messages": [{"role": "user", "content": long}]}
    assert server.post(f"/v1/{where}", body).error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("where", ["completions", "chat/completions"])
def test_logprobs_of_prompts_cannot_be_streamed_for_several_choices(server, where):
    body = {**BODIES[where], "n": 2, "temperature": 1, "stream": True, "prompt_logprobs": 1}
    assert server.post(f"/v1/{where}", body).error["param"] == "prompt_logprobs"


def test_keys_of_logit_bias_that_are_no_token_ids_are_named(server):
    answer = server.post("/v1/completions", {"prompt": "a", "logit_bias": {"bad1": 50, "7": 1, "{bad2}": 20}})
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")
    assert "not 'bad1', '{bad2}'" in answer.error["message"]
