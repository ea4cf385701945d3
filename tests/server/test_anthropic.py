"""/v1/messages and /v1/messages/count_tokens, against the same model offline and /tokenize."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from quire.messages.sampling_params import SamplingParams
from quire.server.anthropic import CountTokensRequest
from support.dictation import CALLS, THOUGHT
from support.server import Answer, Host, Service, eventually

USER = {"role": "user", "content": "Tell me a story about a dog."}
BODY = {"messages": [USER], "max_tokens": 24, "temperature": 0}
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
TOOL = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object"}}


def ask(server: Service, **fields):
    """The message, which is put together from its events if it is streamed."""
    answer = server.post("/v1/messages", {**BODY, **fields})
    assert answer.status == 200, answer.body
    return message_of(events_of(answer)) if fields.get("stream") else answer.json


def events_of(answer: Answer):
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    parsed = []
    for event in events:
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def message_of(events):
    start, ping, *deltas, end, stop = events
    assert [start["type"], ping["type"], end["type"], stop["type"]] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    message, content = start["message"], []
    assert message["usage"]["output_tokens"] == 0
    assert message["usage"]["input_tokens"] == end["usage"]["input_tokens"]
    assert message["content"] == []
    assert (message["stop_reason"], message["stop_sequence"]) == (None, None)
    open_block = None
    for event in deltas:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(content)
            open_block = event["content_block"]
            content.append(open_block)
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(content) - 1
            kind, field = event["delta"]["type"], DELTAS[event["delta"]["type"]]
            assert kind.partition("_")[0] in (open_block["type"], "input")
            if kind == "input_json_delta":
                open_block["input"] = (open_block["input"] or "") + event["delta"][field]
            else:
                open_block[field] += event["delta"][field]
        else:
            assert event == {"type": "content_block_stop", "index": len(content) - 1}
            open_block = None
    assert open_block is None
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    return {**message, "content": content, **end["delta"], "usage": end["usage"]}


def refused(server: Service, fields, path="/v1/messages") -> str:
    """The message of the 400."""
    answer = server.post(path, {**BODY, **fields})
    assert answer.status == 400, answer.body
    assert answer.json.keys() == {"type", "error"}
    assert answer.json["error"]["type"] == "invalid_request_error"
    return answer.json["error"]["message"]


def offline_text(offline, messages, max_tokens=24, **arguments):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    [output] = offline.chat(messages, params, use_tqdm=False, **arguments)
    return output.outputs[0].text


def count(server: Service, **body):
    answer = server.post("/v1/messages/count_tokens", body)
    assert answer.status == 200, answer.body
    return answer.json["input_tokens"]


def tokens_of(server: Service, messages, **fields):
    return server.post("/tokenize", {"messages": messages, **fields}).json["count"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_what_the_offline_engine_says(server, offline, stream):
    message = ask(server, system="Be brief.", stream=stream)
    chat = [{"role": "system", "content": "Be brief."}, USER]
    assert message["content"] == [{"type": "text", "text": offline_text(offline, chat), "citations": []}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "demo")
    assert message["id"].startswith("msg-")
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    assert usage["output_tokens"] == 24
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens_of(server, chat)
    assert usage["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(server, stream):
    whole = ask(server)["content"][0]["text"]
    message = ask(server, stop_sequences=["never", " there"], stream=stream)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " there")
    assert message["content"][0]["text"] == whole.partition(" there")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_ends_by_itself_ends_its_turn(server, stream):
    message = ask(server, messages=[{"role": "user", "content": "Hello"}], max_tokens=1000, stream=stream)
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_last_message_of_the_assistant_is_continued(server, offline, stream):
    chat = [USER, {"role": "assistant", "content": "Once upon a time there was a"}]
    expected = offline_text(offline, chat, continue_final_message=True, add_generation_prompt=False)
    assert ask(server, messages=chat, stream=stream)["content"][0]["text"] == expected


def test_an_answer_without_text_has_no_content(server):
    first = ask(server, max_tokens=1)["content"][0]["text"]
    for stream in (False, True):
        assert ask(server, stop_sequences=[first], stream=stream)["content"] == []


def test_tokens_are_counted_as_the_chat_template_renders_the_conversation(server):
    assert count(server, messages=[USER]) == tokens_of(server, [USER])
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    system = {"role": "system", "content": "Be brief."}
    assert count(server, messages=[USER], system=blocks) == tokens_of(server, [system, USER])
    assert count(server, messages=[USER], system="Be brief.") == tokens_of(server, [system, USER])


BLOCKS = [
    {"type": "thinking", "thinking": "Rome it is.", "signature": "x"},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "text", "text": "I will look."},
    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
]
RESULTS = [
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
    {"type": "tool_result", "tool_use_id": "toolu_0", "content": "cloudy", "is_error": False},
    {"type": "text", "text": "And tomorrow?"},
]
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}


def test_calls_results_and_thoughts_of_earlier_turns_become_openais_messages(server):
    messages = [USER, {"role": "assistant", "content": BLOCKS}, {"role": "user", "content": RESULTS}]
    chat = CountTokensRequest.model_validate({"messages": messages}).chat()
    text = [{"type": "text", "text": "I will look."}]
    translated = [
        USER,
        {"role": "assistant", "content": text, "tool_calls": [CALL], "reasoning": "Rome it is."},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "tool", "tool_call_id": "toolu_0", "content": "cloudy"},
        {"role": "user", "content": [{"type": "text", "text": "And tomorrow?"}]},
    ]
    dumped = [message.model_dump(exclude_none=True) for message in chat.messages]
    assert dumped == translated
    assert count(server, messages=messages) == tokens_of(server, translated)


def test_tools_that_may_not_be_called_reach_the_template(server):
    function = {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    counted = count(server, messages=[USER], tools=[TOOL], tool_choice={"type": "none"})
    assert counted == tokens_of(server, [USER], tools=tools) > tokens_of(server, [USER])
    assert ask(server, tools=[TOOL], tool_choice={"type": "none"})["content"][0]["type"] == "text"


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CALLER = {"caller": {"type": "direct"}}


def said(parrot: Service, text: str, stream: bool, **fields):
    """The content and the stop reason of the answer of a model that says this."""
    message = ask(parrot, messages=[{"role": "user", "content": text}], max_tokens=500, stream=stream, **fields)
    assert all(block.pop("signature", "") == "" for block in message["content"])
    ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    return message["content"], message["stop_reason"]


@STREAMS
def test_thinking_is_a_block_of_its_own(parrot, stream):
    content, reason = said(parrot, THOUGHT, stream, thinking={"type": "adaptive"})
    assert reason == "end_turn"
    assert [block["type"] for block in content] == ["thinking", "text"]
    assert [content[0]["thinking"].strip(), content[1]["text"].strip()] == ["It is a city.", "I will look."]


@STREAMS
def test_tool_calls_are_blocks_behind_thinking_and_text(parrot, stream):
    content, reason = said(parrot, THOUGHT + CALLS, stream, tools=[TOOL])
    assert reason == "tool_use"
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert content[1]["text"].strip() == "I will look."
    assert content[2:] == [
        {"type": "tool_use", "name": "weather", "input": {"city": "Paris", "days": [1, 2]}, **CALLER},
        {"type": "tool_use", "name": "weather", "input": {}, **CALLER},
    ]


@STREAMS
def test_tool_calls_end_thinking_without_an_end_marker(parrot, stream):
    content, reason = said(parrot, "<think>A tool." + CALLS, stream, tools=[TOOL])
    assert reason == "tool_use"
    assert [block["type"] for block in content] == ["thinking", "tool_use", "tool_use"]
    assert content[0]["thinking"].strip() == "A tool."


@STREAMS
def test_only_one_tool_is_called_if_the_request_wants_no_more(parrot, stream):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    content, _ = said(parrot, CALLS.strip(), stream, tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in content] == ["tool_use"]


@STREAMS
def test_calls_that_may_not_be_made_are_text(parrot, stream):
    content, reason = said(parrot, CALLS.strip(), stream, tools=[TOOL], tool_choice={"type": "none"})
    assert (content, reason) == ([{"type": "text", "text": CALLS.strip(), "citations": []}], "end_turn")


@STREAMS
def test_the_bundled_model_calls_a_tool_and_reads_its_result(server, stream):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": schema}
    question = {"role": "user", "content": "What is the weather in Paris?"}
    message = ask(server, messages=[question], tools=[tool], max_tokens=120, stream=stream)
    [block] = message["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert message["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": '{"temperature": 21, "sky": "sunny"}'}
    turns = [question, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    answer = ask(server, messages=turns, tools=[tool], max_tokens=120, stream=stream)
    assert answer["stop_reason"] == "end_turn"
    assert "sunny" in answer["content"][0]["text"]


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
IMPOSSIBLE = {"type": "object", "properties": {"city": {"pattern": "(?=a)b"}}}


def check_city(value):
    assert value.keys() == {"city", "days"}
    assert value["city"] in ("Paris", "Rome")
    assert 1 <= value["days"] <= 9


@STREAMS
def test_a_schema_decides_what_the_answer_looks_like(server, stream):
    config = {"format": {"type": "json_schema", "schema": CITY}}
    message = ask(server, output_config=config, stream=stream, max_tokens=60)
    assert message["stop_reason"] == "end_turn"
    check_city(json.loads(message["content"][0]["text"]))


@STREAMS
@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
def test_a_tool_can_be_forced(server, stream, choice):
    tools = [{"name": "weather", "input_schema": CITY}]
    message = ask(server, tools=tools, tool_choice=choice, stream=stream, max_tokens=200)
    assert message["stop_reason"] == "tool_use"
    assert {(block["type"], block["name"]) for block in message["content"]} == {("tool_use", "weather")}
    for block in message["content"]:
        check_city(block["input"])


def test_the_input_of_a_call_that_was_cut_off_is_what_came_of_it(server):
    tools, choice = [{"name": "weather", "input_schema": CITY}], {"type": "tool", "name": "weather"}
    message = ask(server, tools=tools, tool_choice=choice, max_tokens=7)
    assert message["stop_reason"] == "max_tokens"
    [block] = message["content"]
    assert block["input"].keys() <= {"city", "days"}


@pytest.mark.sampled(2)
@STREAMS
def test_thinking_ends_when_its_budget_is_used_up(parrot, stream):
    text = f"<think>{'hm ' * 100}</think>Yes."
    thinking = {"type": "enabled", "budget_tokens": 20}
    content, _ = said(parrot, text, stream, thinking=thinking)
    assert content[0]["type"] == "thinking"
    assert 0 < content[0]["thinking"].count("hm") <= 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_followed_is_refused(server, stream):
    for fields, name in (
        ({"output_config": {"format": {"type": "json_schema", "schema": IMPOSSIBLE}}}, "output_config.format"),
        ({"tools": [{"name": "x", "input_schema": IMPOSSIBLE}], "tool_choice": {"type": "any"}}, "tools"),
    ):
        assert refused(server, {**fields, "stream": stream}).startswith(f"{name}: ")


def test_thinking_can_be_switched_off(server):
    chat = CountTokensRequest.model_validate({"messages": [USER], "thinking": {"type": "disabled"}}).chat()
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert ask(server, thinking={"type": "disabled"})["content"][0]["type"] == "text"


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{**RESULTS[0], "content": [IMAGE]}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{**RESULTS[0], "content": [{**IMAGE, "type": "document"}]}]}]},
            "messages[0].content[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**BLOCKS[3], "input": "x"}]}]},
            "messages[0].content[0].input",
        ),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 2000}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"tools": [{"name": "weather"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_a_wrong_field_is_named(server, host: Host, fields, name):
    assert name in refused(server, fields)
    assert name in refused(server, {**fields, "stream": True})
    eventually(lambda: host.is_idle)


def test_other_errors_have_anthropics_types(server):
    answer = server.post("/v1/messages", {**BODY, "model": "claude"})
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    answer = server.request("POST", "/v1/messages", b"{", Content_Type="application/json")
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    answer = server.get("/v1/messages")
    assert (answer.status, answer.json["type"]) == (405, "error")


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def test_what_claude_code_sends_is_accepted(server, caplog):
    """The request of a session with tools, extended thinking and context management, and its count of tokens."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b"}
    body = {
        "model": "demo",
        "system": [billing, {"type": "text", "text": "Be brief.", **EPHEMERAL}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": USER["content"], **EPHEMERAL}]}],
        "tools": [
            {**TOOL, "eager_input_streaming": True, "defer_loading": False, **EPHEMERAL},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        ],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "max"},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "speed": "fast",
        "container": None,
        "inference_geo": "us",
    }
    counted = server.post("/v1/messages/count_tokens?beta=true", body)
    assert counted.status == 200, counted.body
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"}
    answer = server.post("/v1/messages?beta=true", {**body, "max_tokens": 32_000, "stop_sequences": [" "]}, **headers)
    assert answer.status == 200, answer.body
    usage = answer.json["usage"]
    assert counted.json["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert "web_search_20250305" in caplog.text
    assert "Ignored a field" not in caplog.text
    plain = [{"role": "system", "content": "Be brief."}, USER]
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}},
        }
    ]
    assert counted.json["input_tokens"] == tokens_of(server, plain, tools=tools)


def test_max_tokens_are_shortened_to_what_fits(server, host):
    message = ask(server, messages=[{"role": "user", "content": "Hello"}], max_tokens=32_000)
    assert message["stop_reason"] == "end_turn"
    limited = host.serve(max_generated_tokens=5)
    assert ask(limited, max_tokens=32_000)["usage"]["output_tokens"] == 5


def test_blocks_of_a_conversation_with_claude_are_read_or_ignored(server):
    text = {"type": "text", "text": "red"}
    cited = {"type": "search_result", "source": "https://a.example", "title": "Colours", "content": [text]}
    document = {
        "type": "document",
        "title": "Book",
        "source": {"type": "text", "media_type": "text/plain", "data": "x"},
    }
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [cited, reference], **EPHEMERAL}
    messages = [
        {"role": "user", "content": [document, text]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, search, found, text, BLOCKS[3]]},
        {"role": "user", "content": [result]},
    ]
    chat = CountTokensRequest.model_validate({"messages": messages}).chat()
    dumped = [message.model_dump(exclude_none=True) for message in chat.messages]
    assert dumped == [
        {"role": "user", "content": [{"type": "text", "text": "Book\nx"}, text]},
        {"role": "assistant", "content": [text], "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "toolu_1",
            "name": "weather",
            "content": [
                {"type": "text", "text": "Colours\nhttps://a.example\nred"},
                {"type": "text", "text": "weather"},
            ],
        },
    ]
    assert count(server, messages=messages) == tokens_of(server, dumped)
    assert "source" in refused(server, {"messages": [{"role": "user", "content": [PDF]}]})


def test_later_system_messages_stay_where_the_template_takes_them(server):
    messages = [USER, {"role": "system", "content": "A reminder."}, USER]
    assert count(server, messages=messages) == tokens_of(server, messages)


def test_later_system_messages_move_to_the_beginning_where_the_template_wants_them(tmp_path):
    template = """{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}{%- endif %}
        {{- m.role + ':' }}{% if m.content is string %}{{ m.content }}{% else %}
        {%- for part in m.content %}{{ part.text }}|{% endfor %}{% endif %};{% endfor %}"""
    (path := tmp_path / "first.jinja").write_text(template)
    host = Host(dtype="float32", kv_cache_memory_bytes=16 << 20, chat_template=str(path))
    try:
        server = host.serve()
        reminder = {"role": "system", "content": [{"type": "text", "text": "A reminder."}]}
        moved = [{"role": "system", "content": "Be brief.|A reminder.|"}, USER, USER]
        for _ in range(2):
            counted = count(server, system="Be brief.", messages=[USER, reminder, USER])
            assert counted == tokens_of(server, moved)
        assert ask(server, messages=[USER, reminder], max_tokens=1)["usage"]["output_tokens"] == 1
    finally:
        host.close()


def test_variables_of_the_template_and_a_salt_can_be_sent(server, host):
    body = {"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "adaptive"}}
    chat = CountTokensRequest.model_validate({"messages": [USER], **body}).chat()
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    long = {"role": "user", "content": "Tell me about dogs and about cats. " * 8}
    for salt, cached in (("one", False), ("one", True), ("two", False)):
        message = ask(server, messages=[long], cache_salt=salt, max_tokens=1)
        assert (message["usage"]["cache_read_input_tokens"] > 0) is cached, salt
    assert "cache_salt" in refused(server, {"cache_salt": ""})
    assert "watermarking is not supported" in refused(server, {"watermarking": True})


def test_the_older_field_of_a_format_is_read(server):
    message = ask(server, output_format={"type": "json_schema", "schema": CITY}, max_tokens=60)
    check_city(json.loads(message["content"][0]["text"]))


def test_models_are_listed_in_anthropics_form_for_anthropics_clients(host):
    several = host.serve(served_model_name=["one", "two", "three"])
    version = {"anthropic-version": "2023-06-01"}

    def page(query: str = ""):
        answer = several.get(f"/v1/models{query}", **version)
        assert answer.status == 200, answer.body
        return [card["id"] for card in answer.json["data"]], answer.json["has_more"]

    listed = several.get("/v1/models", **version).json
    assert listed.keys() == {"data", "has_more", "first_id", "last_id"}
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("one", "three", False)
    for card in listed["data"]:
        assert card.keys() == {
            "type",
            "id",
            "display_name",
            "created_at",
            "lifecycle",
            "deprecated_at",
            "retires_at",
            "line",
            "max_input_tokens",
            "max_tokens",
            "capabilities",
        }
        assert (card["lifecycle"], card["max_input_tokens"], card["max_tokens"]) == ("active", 2048, 2048)
        assert (card["type"], card["display_name"]) == ("model", card["id"])
        assert datetime.fromisoformat(card["created_at"]).tzinfo is not None
    assert several.get("/v1/models/two", **version).json == listed["data"][1]
    assert several.get("/v1/models").json["object"] == "list"
    assert page("?limit=2") == (["one", "two"], True)
    assert page("?limit=2&after_id=two") == (["three"], False)
    assert page("?limit=1&before_id=three") == (["two"], True)
    assert several.get("/v1/models?after_id=four", **version).error["param"] == "after_id"
    assert several.get("/v1/models?limit=0", **version).error["param"] == "limit"


def test_a_prompt_that_cannot_fit_is_not_counted(server):
    messages = [{"role": "user", "content": "word " * 1_000_000}]
    assert "max_model_len is 2048" in refused(server, {"messages": messages}, "/v1/messages/count_tokens")
    assert "max_model_len is 2048" in refused(server, {"messages": messages})


def test_an_error_within_a_stream_is_an_event(host: Host):
    endless = [USER, {"role": "assistant", "content": " ".join("1" * 15)}]
    answer = host.post_until_time_is_up("/v1/messages", {**BODY, "messages": endless, "max_tokens": 1500})
    *_, last = events_of(answer)
    assert last["type"] == "error"
    assert last["error"]["type"] == "timeout_error"


def test_unknown_fields_are_logged_once(server, caplog):
    for _ in range(2):
        assert ask(server, betas=["x"], n=7)["content"]
    assert caplog.text.count("Ignored a field that is not known: 'betas'") == 1
