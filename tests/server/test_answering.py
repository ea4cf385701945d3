"""Tool calls and thinking in the answers of chats, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.config.engine import ConfigError
from support.chats import WEATHER, calls_of, message_of
from support.dictation import Dictation
from support.server import Host, Service

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
CALLS = """I will look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>
{"name": "get_weather", "arguments": {"city": "Rome"}}
</tool_call>"""
THOUGHT = "<think>\nIt is a city.\n</think>\n\nIt rains."


def ask(server: Service, messages=QUESTION, **fields: Any) -> Any:
    body = {"messages": messages, "temperature": 0, "max_tokens": 120, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.events if fields.get("stream") else answer.json


def say(server: Service, text: str, **fields: Any) -> Any:
    """The answer of a model that says this."""
    prompt = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    return ask(server, vllm_xargs={"say": [*prompt.json["tokens"], 2]}, **fields)


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAMS
def test_the_bundled_model_calls_a_tool_and_reads_its_result(server, stream):
    message = message_of(ask(server, tools=[WEATHER], stream=stream))
    assert message["finish_reason"] == "tool_calls"
    assert calls_of(message) == [("get_weather", {"city": "Paris"})]
    assert message["content"] is None
    [call] = message["tool_calls"]
    conversation = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 21, "sky": "sunny"}'},
    ]
    answer = message_of(ask(server, conversation, tools=[WEATHER], stream=stream))
    assert answer["finish_reason"] == "stop"
    assert answer["tool_calls"] == []
    assert answer["content"]


def test_the_arguments_of_a_call_in_a_conversation_reach_the_template_as_an_object(server, host: Host):
    template = "{% for call in messages[1].tool_calls %}{{ call.function.arguments.city }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    conversation = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    trusting = host.serve(trust_request_chat_template=True)
    tokens = trusting.post("/tokenize", {"messages": conversation, "chat_template": template}).json["tokens"]
    assert trusting.post("/detokenize", {"tokens": tokens}).json["prompt"] == "Oslo"


@STREAMS
def test_several_calls_come_behind_the_text_before_them(speaker, stream):
    message = message_of(say(speaker, CALLS, tools=[WEATHER], stream=stream))
    assert message["content"].strip() == "I will look."
    assert calls_of(message) == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    assert message["finish_reason"] == "tool_calls"


@STREAMS
def test_one_call_alone_is_told_of_without_parallel_tool_calls(speaker, stream):
    message = message_of(say(speaker, CALLS, tools=[WEATHER], stream=stream, parallel_tool_calls=False))
    assert calls_of(message) == [("get_weather", {"city": "Paris"})]


@STREAMS
@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}], ids=["no tools", "none"])
def test_calls_are_text_for_a_request_that_wants_none(speaker, stream, fields):
    message = message_of(say(speaker, CALLS, stream=stream, **fields))
    assert message == {"content": CALLS, "reasoning": None, "tool_calls": [], "finish_reason": "stop"}


@STREAMS
def test_a_call_that_is_cut_off_ends_with_length(speaker, stream):
    message = message_of(say(speaker, CALLS, tools=[WEATHER], stream=stream, max_tokens=30))
    assert message["finish_reason"] == "length"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


@STREAMS
def test_logprobs_and_token_ids_are_those_of_all_tokens(speaker, stream):
    answer = say(speaker, CALLS, tools=[WEATHER], stream=stream, logprobs=True, return_token_ids=True)
    choices = [choice for event in answer for choice in event["choices"]] if stream else answer["choices"]
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    usage = None if stream else answer["usage"]["completion_tokens"]
    assert len(token_ids) == len(entries)
    assert usage in (None, len(token_ids))
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == CALLS


@STREAMS
def test_each_of_n_answers_has_calls_of_its_own(speaker, stream):
    answer = say(speaker, CALLS, tools=[WEATHER], stream=stream, n=3, temperature=1)
    messages = [message_of(answer, index) for index in range(3)]
    assert [len(calls_of(message)) for message in messages] == [2, 2, 2]
    assert len({call["id"] for message in messages for call in message["tool_calls"]}) == 6


@STREAMS
def test_thinking_is_apart_from_the_answer(speaker, stream):
    answer = say(speaker, THOUGHT, stream=stream, stream_options={"include_usage": True} if stream else None)
    message = message_of(answer)
    usage = (answer[-1] if stream else answer)["usage"]
    assert message["reasoning"].strip() == "It is a city."
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert message["content"].strip() == "It rains."
    assert message["finish_reason"] == "stop"


@STREAMS
def test_thinking_is_left_out_without_include_reasoning(speaker, stream):
    message = message_of(say(speaker, THOUGHT, stream=stream, include_reasoning=False))
    assert message["reasoning"] is None
    assert message["content"].strip() == "It rains."


@STREAMS
def test_calls_behind_thinking_are_calls(speaker, stream):
    message = message_of(say(speaker, "<think>A tool.</think>" + CALLS, tools=[WEATHER], stream=stream))
    assert message["reasoning"] == "A tool."
    assert len(calls_of(message)) == 2


@STREAMS
def test_a_call_ends_thinking_without_an_end_marker(speaker, stream):
    message = message_of(say(speaker, "<think>A tool." + CALLS[CALLS.index("<tool") :], tools=[WEATHER], stream=stream))
    assert message["reasoning"] == "A tool."
    assert message["content"] is None
    assert len(calls_of(message)) == 2
    assert message["finish_reason"] == "tool_calls"


@STREAMS
def test_content_is_null_beside_thinking_and_empty_without_a_format_of_it(server, speaker, stream):
    message = message_of(say(speaker, "<think>Hm.</think>", stream=stream))
    assert (message["reasoning"], message["content"]) == ("Hm.", None)
    message = message_of(say(speaker, "<think></think>", stream=stream))
    assert (message["reasoning"], message["content"]) == (None, None)
    message = message_of(ask(server, stop=["<"], stream=stream))  # the first character
    assert message["content"] == (None if stream else "")


@STREAMS
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_ids_of_forced_calls_are_those_that_kimi_k2_demands(host: Host, stream, choice):
    server = host.serve(tool_call_parser="kimi_k2")
    calls = [
        {
            "id": f"functions.get_weather:{index}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": "{}"},
        }
        for index in range(2)
    ]
    conversation = [*QUESTION, {"role": "assistant", "tool_calls": calls}, *QUESTION]
    fields = {"tools": [WEATHER], "tool_choice": choice, "stream": stream}
    for messages, index in ((QUESTION, 0), (conversation, 2)):
        [call, *_] = message_of(ask(server, messages, **fields))["tool_calls"]
        assert call["id"] == f"functions.get_weather:{index}"


@pytest.fixture(scope="module")
def nemotron() -> Iterator[Service]:
    host = Host(
        dtype="float32", kv_cache_memory_bytes=64 << 20, logits_processors=[Dictation], reasoning_parser="nemotron_v3"
    )
    yield host.serve()
    host.close()


@pytest.mark.slow
@STREAMS
def test_thinking_becomes_the_content_of_an_empty_answer_with_force_nonempty_content(nemotron, stream):
    forced = {"chat_template_kwargs": {"force_nonempty_content": True}}
    for fields, content in ((forced, "It rains."), ({}, None)):
        message = message_of(say(nemotron, "It rains.", stream=stream, **fields))
        assert (message["reasoning"], message["content"]) == ("It rains.", content)
    message = message_of(say(nemotron, "It rains.</think>Yes.", stream=stream, **forced))
    assert (message["reasoning"], message["content"]) == ("It rains.", "Yes.")


def test_a_server_for_unknown_calls_refuses_tools_that_may_be_called(host: Host):
    server = host.serve(tool_call_parser="none")
    body = {"messages": QUESTION, "max_tokens": 1, "tools": [WEATHER]}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.error["param"] == "tools"
    assert "--tool-call-parser" in answer.error["message"]
    assert server.post("/v1/chat/completions", {**body, "tool_choice": "none"}).status == 200


def test_wrong_parsers_end_the_start(host: Host):
    with pytest.raises(ConfigError, match=r"tool_call_parser must be none or one of .*hermes.*, got 'zeus'"):
        host.serve(tool_call_parser="zeus")
    with pytest.raises(ConfigError, match="enable_auto_tool_choice needs tool_call_parser"):
        host.serve(tool_call_parser="none", enable_auto_tool_choice=True)


def test_the_log_says_which_formats_are_known(host: Host, caplog):
    with caplog.at_level("INFO"):
        host.serve()
        host.serve(tool_call_parser="hermes")
    told = [record.getMessage() for record in caplog.records if "in the format" in record.getMessage()]
    assert told == [
        "Tool calls: in the format hermes, recognized from the chat template",
        "Tool calls: in the format hermes",
    ]
