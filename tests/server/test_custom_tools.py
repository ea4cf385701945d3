"""Custom tools, namespaces, the local shell and hosted tools: on /v1/responses and in chats, whole and streamed."""

from __future__ import annotations

import json
import re

import pytest
from openai import OpenAI
from openai.types.responses import Response

from quire.server.custom_tools import InputDecoder
from quire.server.response_items import ResponsesRequest
from support.server import Host, Service

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+say "hi" \\d\n*** End Patch\n'
# As Codex sends it.
LARK = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.{1,12})/
add_line: "+" /(.{0,12})/ LF -> line

%import common.LF
"""
PATCHES = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}
FREE = {"type": "custom", "name": "run", "description": "Runs code."}
DATE = {**FREE, "name": "date", "format": {"type": "grammar", "syntax": "regex", "definition": r"\d{4}-\d\d"}}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CODEX = [
    {**WEATHER, "name": "exec_command"},
    PATCHES,
    {"type": "namespace", "name": "mcp__docs", "description": "Documents.", "tools": [WEATHER, FREE]},
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
]
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
GREEDY = {"model": "demo", "temperature": 0.0, "max_output_tokens": 200}


def hermes(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def client_of(service: Service) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def service(host: Host) -> Service:
    return host.serve(response_store="memory")


def response_of(service: Service, stream: bool, **fields) -> Response:
    """The response, which a stream's events must agree with."""
    body = {**GREEDY, **fields}
    if not stream:
        return client_of(service).responses.create(**body)
    events = list(client_of(service).responses.create(**body, stream=True))
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    final = events[-1].response
    assert [item.to_dict() for item in done] == [item.to_dict() for item in final.output]
    assert [(item.type, item.id) for item in added] == [(item.type, item.id) for item in done]
    for item in done:
        if item.type == "custom_tool_call":
            deltas = [
                e.delta for e in events if e.type == "response.custom_tool_call_input.delta" and e.item_id == item.id
            ]
            [whole] = [e for e in events if e.type == "response.custom_tool_call_input.done" and e.item_id == item.id]
            assert "".join(deltas) == whole.input == item.input
    return final


@STREAMS
def test_codexs_tools_are_called_under_their_own_names(parrot, stream, caplog):
    shell = hermes("local_shell", command=["ls", "-l"], working_directory="/tmp", timeout_ms=500)
    calls = [
        hermes("apply_patch", input=PATCH),
        hermes("mcp__docs__weather", city="Rome"),
        hermes("mcp__docs__run", input="1 + 1"),
        shell,
        hermes("exec_command", cmd="ls"),
    ]
    response = response_of(parrot, stream, input="\n".join(calls), tools=CODEX, max_output_tokens=600)
    patch, weather, run, local, command = response.output
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert patch.id.startswith("ctc_")
    assert (weather.type, weather.name, weather.namespace) == ("function_call", "weather", "mcp__docs")
    assert json.loads(weather.arguments) == {"city": "Rome"}
    assert (run.type, run.name, run.namespace, run.input) == ("custom_tool_call", "run", "mcp__docs", "1 + 1")
    assert local.type == "local_shell_call"
    assert local.action.to_dict() == {
        "type": "exec",
        "command": ["ls", "-l"],
        "env": {},
        "working_directory": "/tmp",
        "timeout_ms": 500,
    }
    assert (command.type, command.name) == ("function_call", "exec_command")
    assert response.to_dict()["tools"] == [{**CODEX[0], "description": None}, *CODEX[1:]]
    assert len({item.call_id for item in response.output}) == 5
    if not stream:
        for kind in ("web_search", "image_generation"):
            assert caplog.text.count(f"of a type that this server does not have: '{kind}'") <= 1


@STREAMS
def test_a_conversation_with_such_calls_goes_on(parrot, stream):
    calls = [
        hermes("apply_patch", input=PATCH),
        hermes("mcp__docs__weather", city="Rome"),
        hermes("local_shell", command=["ls"]),
    ]
    first = response_of(parrot, stream, input="\n".join(calls), tools=CODEX, max_output_tokens=400)
    patch, weather, local = first.output
    outputs = [
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done."},
        {"type": "function_call_output", "call_id": weather.call_id, "output": "sunny"},
        {"type": "local_shell_call_output", "id": local.call_id, "output": "a.txt"},
    ]
    asked = {"tools": CODEX, "store": False}
    question = {"role": "user", "content": "And?"}
    stored = response_of(parrot, stream, input=[*outputs, question], previous_response_id=first.id, **asked)
    items = [{"role": "user", "content": "\n".join(calls)}, *(item.to_dict() for item in first.output), *outputs]
    sent = response_of(parrot, stream, input=[*items, question], **asked)
    assert stored.output_text == sent.output_text == "And?"
    assert stored.usage.input_tokens == sent.usage.input_tokens
    replayed = list(client_of(parrot).responses.retrieve(first.id, stream=True))
    assert replayed[-1].response.to_dict() == first.to_dict()


def test_items_of_codexs_histories_become_messages():
    items = [
        {"role": "user", "content": "Go."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "gAAAAAB"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": PATCH},
        {"type": "function_call", "call_id": "2", "name": "weather", "namespace": "mcp__docs", "arguments": "{}"},
        {
            "type": "local_shell_call",
            "id": "lsh_1",
            "call_id": "3",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None},
        },
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "Done."}]},
        {"type": "local_shell_call_output", "call_id": "3", "output": "a.txt"},
    ]
    body = ResponsesRequest.model_validate({"input": items})
    messages = [message.model_dump(exclude_unset=True) for message in body.chat(body.items()).messages]
    functions = [("apply_patch", {"input": PATCH}), ("mcp__docs__weather", {}), ("local_shell", {"command": ["ls"]})]
    assert [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in messages[1]["tool_calls"]
    ] == functions
    assert messages[0] == {"role": "user", "content": "Go."}
    assert messages[1].keys() == {"role", "tool_calls"}
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "1", "content": "Done."},
        {"role": "tool", "tool_call_id": "3", "content": "a.txt"},
    ]


@STREAMS
def test_thinking_comes_back_as_encrypted_content(parrot, stream):
    text = "<think>\nIt is a city.\n</think>\n\nIt rains."
    response = response_of(parrot, stream, input=text, include=["reasoning.encrypted_content"], store=False)
    thought, answer = response.output
    sent = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    question, last = {"role": "user", "content": text}, {"role": "user", "content": "More."}
    whole = [question, thought.to_dict(), answer.to_dict(), last]
    counts = {
        response_of(parrot, stream, input=items, store=False).usage.input_tokens
        for items in (whole, [question, sent, answer.to_dict(), last])
    }
    assert len(counts) == 1
    without = response_of(parrot, stream, input=[question, answer.to_dict(), last], store=False)
    assert without.usage.input_tokens <= min(counts)


PATCH_LIKE = re.compile(
    r"\*\*\* Begin Patch\n(\*\*\* Add File: .{1,12}\n(\+.{0,12}\n)+|\*\*\* Delete File: .{1,12}\n)+\*\*\* End Patch\n?"
)


@STREAMS
@pytest.mark.parametrize(
    ("tool", "choice", "form"),
    [
        (PATCHES, {"type": "custom", "name": "apply_patch"}, PATCH_LIKE),
        (PATCHES, "required", PATCH_LIKE),
        (DATE, {"type": "custom", "name": "date"}, re.compile(r"\d{4}-\d\d")),
        (
            DATE,
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "date"}]},
            re.compile(r"\d{4}-\d\d"),
        ),
    ],
    ids=["named lark", "required lark", "named regex", "allowed regex"],
)
def test_the_input_of_a_forced_tool_follows_its_grammar(service, stream, tool, choice, form):
    response = response_of(service, stream, input="Edit.", tools=[tool], tool_choice=choice, max_output_tokens=400)
    [call] = response.output
    assert (call.type, call.name) == ("custom_tool_call", tool["name"])
    if response.status == "completed":
        assert form.fullmatch(call.input), call.input
    assert response.to_dict()["tool_choice"] == choice


@STREAMS
def test_a_forced_choice_among_several_tools_has_the_form_of_a_regex(service, stream):
    asked = {"input": "When?", "tools": [DATE, {**DATE, "name": "other"}], "tool_choice": "required"}
    response = response_of(service, stream, parallel_tool_calls=False, **asked)
    [call] = response.output
    assert call.type == "custom_tool_call"
    assert re.fullmatch(r"\d{4}-\d\d", call.input)


@STREAMS
def test_a_tool_of_a_namespace_can_be_named(service, stream):
    tools = [
        {"type": "namespace", "name": "one", "tools": [WEATHER]},
        {"type": "namespace", "name": "two", "tools": [WEATHER, {**WEATHER, "name": "time"}]},
    ]
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools[1]["tools"][1]["parameters"] = city
    for choice in (
        {"type": "function", "name": "time"},
        {"type": "function", "name": "two__time"},
        {"type": "function", "name": "time", "namespace": "two"},
    ):
        [call] = response_of(service, stream, input="When?", tools=tools, tool_choice=choice).output
        assert (call.name, call.namespace, json.loads(call.arguments)) == ("time", "two", {"city": "Rome"})
    body = {**GREEDY, "input": "a", "tools": tools, "tool_choice": {"type": "function", "name": "weather"}}
    answer = service.post("/v1/responses", body)
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    assert "one__weather, two__weather" in answer.error["message"]


def test_a_wrong_grammar_counts_only_if_its_tool_is_forced(service):
    wrong = {**PATCHES, "format": {"type": "grammar", "syntax": "lark", "definition": "start: missing"}}
    body = {**GREEDY, "input": "Hello!", "tools": [wrong], "max_output_tokens": 4}
    assert service.post("/v1/responses", body).status == 200
    for stream in (False, True):
        answer = service.post("/v1/responses", {**body, "tool_choice": "required", "stream": stream})
        assert (answer.status, answer.error["param"]) == (400, "tools")


def test_a_response_has_the_request_id_that_its_client_chose(service):
    client, other = client_of(service), OpenAI(base_url=f"{service.url}/v1", api_key="other", max_retries=0)
    chosen = {"extra_body": {"request_id": "mine"}}
    mine = client.responses.create(input="Hello!", **GREEDY, **chosen)
    theirs = other.responses.create(input="Tell me a story.", **GREEDY, **chosen)
    assert mine.id == theirs.id == "mine"
    assert client.responses.retrieve("mine").output_text == mine.output_text != theirs.output_text
    assert other.responses.retrieve("mine").output_text == theirs.output_text
    continued = client.responses.create(input="More.", previous_response_id="mine", **GREEDY)
    texts = [item.content[0].text for item in client.responses.input_items.list(continued.id, order="asc")]
    assert texts == ["Hello!", mine.output_text, "More."]
    client.responses.delete("mine")
    assert other.responses.retrieve("mine").output_text == theirs.output_text
    body = {"input": "a", "request_id": continued.id}
    assert service.post("/v1/responses", body, Authorization="Bearer other").error["param"] == "request_id"


IN_CHATS = [
    {"type": "custom", "custom": {"name": "run", "description": "Runs code."}},
    {"type": "function", "function": {"name": "weather"}},
    {"type": "web_search_preview"},
]


def message_of(service: Service, stream: bool, **fields):
    """(the message, the finish reason), put together from its chunks if it is streamed."""
    body = {"model": "demo", "temperature": 0.0, "max_tokens": 300, **fields}
    if not stream:
        [choice] = client_of(service).chat.completions.create(**body).choices
        return choice.message.to_dict(), choice.finish_reason
    message: dict = {"content": "", "tool_calls": []}
    reason = None
    for chunk in client_of(service).chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            for call in choice.delta.to_dict().get("tool_calls", []):
                index = call.pop("index")
                if index == len(message["tool_calls"]):
                    message["tool_calls"].append(call)
                    continue
                begun = message["tool_calls"][index]
                kind, field = ("custom", "input") if begun["type"] == "custom" else ("function", "arguments")
                begun[kind][field] += call[kind][field]
    return message, reason


@STREAMS
def test_chats_call_custom_tools_and_go_on(parrot, stream):
    text = hermes("run", input="a = 1\nb") + hermes("weather", city="Rome")
    question = {"role": "user", "content": text}
    message, reason = message_of(parrot, stream, messages=[question], tools=IN_CHATS)
    custom, function = message["tool_calls"]
    assert reason == "tool_calls"
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "run", "input": "a = 1\nb"})
    assert "function" not in custom
    assert (function["type"], json.loads(function["function"]["arguments"])) == ("function", {"city": "Rome"})
    turn = {"role": "assistant", "content": None, "tool_calls": [custom]}
    result = {"role": "tool", "tool_call_id": custom["id"], "content": "2"}
    messages = [question, turn, result, {"role": "user", "content": "Well."}]
    assert message_of(parrot, stream, messages=messages, tools=IN_CHATS)[0]["content"] == "Well."


@STREAMS
def test_a_named_custom_tool_of_a_chat_takes_the_whole_answer(parrot, stream):
    choice = {"type": "custom", "custom": {"name": "run"}}
    asked = {"messages": [{"role": "user", "content": " print(1)\n"}], "tools": IN_CHATS, "tool_choice": choice}
    message, reason = message_of(parrot, stream, **asked)
    assert reason == "stop"
    assert [call["custom"] for call in message["tool_calls"]] == [{"name": "run", "input": " print(1)\n"}]
    assert not message["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format",
        ),
        ({"tools": [{"type": 5}]}, "tools[0]"),
        ({"tools": IN_CHATS, "tool_choice": {"type": "custom", "custom": {"name": "weather"}}}, "tool_choice"),
        ({"tools": IN_CHATS, "tool_choice": {"type": "function", "function": {"name": "run"}}}, "tool_choice"),
        ({"tools": IN_CHATS[2:], "tool_choice": "required"}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_a_wrong_custom_tool_is_named(server, fields, param):
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    answer = server.post("/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.error


INPUTS = {
    json.dumps({"input": 'a"b\n*** é 😀 end\\'}): 'a"b\n*** é 😀 end\\',
    json.dumps({"input": "\x00\u2028 é 😀"}, ensure_ascii=False): "\x00\u2028 é 😀",
    '{ "input" : "a\nb"}': "a\nb",
    '{"input":"cut \\u00': "cut ",
    '{"input":"cut \\ud83d': "cut ",
    '{"input":"a \\d+ \\\\d"}': "a \\d+ \\d",
    '{"input":"\\ud800 lone surrogate"}': "\ufffdd800 lone surrogate",
    '{"other": 1, "input": "x"}': "x",
    '{"patch": "abc"}': "abc",
    "raw text": "raw text",
    '{"input": 5}': '{"input": 5}',
    '["a"]': '["a"]',
    "": "",
}


@pytest.mark.parametrize("arguments", INPUTS)
def test_the_input_is_decoded_from_any_pieces_of_the_arguments(arguments):
    for size in (1, 3, 1000):
        decoder = InputDecoder()
        pieces = [decoder.feed(arguments[start : start + size]) for start in range(0, len(arguments), size)]
        assert "".join([*pieces, decoder.finish()]) == INPUTS[arguments]
