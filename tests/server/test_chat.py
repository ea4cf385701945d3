"""/v1/chat/completions, /tokenize and /detokenize, against the same model offline."""

from __future__ import annotations

import pytest

from quire.messages.sampling_params import SamplingParams
from support.server import Host, Service

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story about a dog."}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def ask(server: Service, messages=CHAT, **fields):
    answer = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 24, **fields})
    assert answer.status == 200, answer.body
    return answer.events if fields.get("stream") else answer.json


def texts_of(answer):
    if isinstance(answer, dict):
        return [choice["message"]["content"] for choice in answer["choices"]]
    texts = {}
    for event in answer:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return [texts[index] for index in range(len(texts))]


def offline_texts(offline, messages=CHAT, params=GREEDY, **arguments):
    [output] = offline.chat(messages, params, use_tqdm=False, **arguments)
    return [completion.text for completion in output.outputs]


def prompt_of(server: Service, messages, **fields) -> str:
    tokens = server.post("/tokenize", {"messages": messages, **fields}).json["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json["prompt"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_says_what_the_offline_engine_says(server, offline, stream):
    assert texts_of(ask(server, stream=stream)) == offline_texts(offline)


@pytest.mark.parametrize("stream", [False, True])
def test_n_seeded_choices_say_what_the_offline_engine_says(server, offline, stream):
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=24)
    assert texts_of(ask(server, temperature=1.0, seed=3, n=4, stream=stream)) == offline_texts(offline, params=params)


def test_a_stream_begins_with_the_role_of_each_choice_and_ends_with_its_reason(server):
    events = ask(server, n=3, temperature=1, stream=True, stream_options={"include_usage": True})
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    first = {}
    for event in events[:-1]:
        [choice] = event["choices"]
        assert event["usage"] is None
        first.setdefault(choice["index"], choice)
    assert [first[index]["delta"] for index in range(3)] == [{"role": "assistant", "content": ""}] * 3
    ends = [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]]
    assert len(ends) == 3
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] <= 3 * 24


def test_max_completion_tokens_counts_before_max_tokens(server):
    assert ask(server, max_completion_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_a_chat_without_max_tokens_goes_on_as_the_model_recommends(server):
    assert ask(server, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 512


def test_two_answers_of_the_bundled_model_need_no_temperature(server):
    """Its generation_config.json, like that of other checkpoints, need not be understood to sample."""
    answer = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 8, "n": 2})
    assert answer.status == 200, answer.body
    assert len(answer.json["choices"]) == 2


def test_continuous_usage_begins_at_zero(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ask(server, max_tokens=4, ignore_eos=True, stream=True, stream_options=options)
    usages = [event["usage"] for event in events]
    assert usages[0]["completion_tokens"] == 0
    assert usages[0]["total_tokens"] == usages[0]["prompt_tokens"] == usages[-1]["prompt_tokens"]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == 4


FIELDS_OF_LENGTH = pytest.mark.parametrize(
    "field", ["max_tokens", pytest.param("max_completion_tokens", marks=pytest.mark.slow)]
)


@FIELDS_OF_LENGTH
def test_max_tokens_are_shortened_to_what_fits_unless_they_exceed_the_context(server, field):
    room = 2048 - ask(server)["usage"]["prompt_tokens"]
    answer = server.post("/v1/chat/completions", {"messages": CHAT, field: 2048, "temperature": 0, "ignore_eos": True})
    assert answer.json["usage"]["completion_tokens"] == room
    error = server.post("/v1/chat/completions", {"messages": CHAT, field: 2049}).error
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert error["message"] == f"{field} is 2049, but this model's maximum context length is 2048 tokens"


@FIELDS_OF_LENGTH
def test_strictly_more_tokens_than_the_context_has_room_for_are_refused(host, server, field):
    strict, used = host.serve(strict_max_tokens=True), ask(server)["usage"]["prompt_tokens"]
    room = 2048 - used
    assert strict.post("/v1/chat/completions", {"messages": CHAT, field: room, "stop": [" "]}).status == 200
    error = strict.post("/v1/chat/completions", {"messages": CHAT, field: room + 1}).error
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert error["message"].startswith(
        f"This model's maximum context length is 2048 tokens. However, you requested {room + 1} output tokens and "
        f"your prompt contains {used} input tokens, for a total of 2049 tokens."
    )
    message = {"messages": CHAT, "max_tokens": 32_000}
    assert "maximum context length is 2048" in strict.post("/v1/messages", message).json["error"]["message"]


def test_content_may_be_parts_of_text(server):
    parts = [{"type": "text", "text": "Tell me a story"}, {"type": "text", "text": "about a dog."}]
    joined = [{"role": "user", "content": "Tell me a story\nabout a dog."}]
    assert texts_of(ask(server, [{"role": "user", "content": parts}])) == texts_of(ask(server, joined))


def test_texts_may_stand_in_parts_of_every_type_and_as_plain_strings(server):
    parts = [
        "Tell me",
        {"type": "input_text", "text": "a story"},
        {"type": "output_text", "text": "about"},
        {"type": "refusal", "refusal": "a"},
        {"type": "thinking", "thinking": "dog."},
    ]
    joined = [{"role": "user", "content": "Tell me\na story\nabout\na\ndog."}]
    assert prompt_of(server, [{"role": "user", "content": parts}]) == prompt_of(server, joined)


def test_a_message_of_any_role_and_without_content_reaches_the_template(server, host: Host):
    template = "{% for m in messages %}{{ m.role + '=' + m.content }};{% endfor %}"
    trusting = host.serve(trust_request_chat_template=True)
    for empty in ({"role": "judge"}, {"role": "judge", "content": None}, {"role": "judge", "content": []}):
        chat = [empty, {"role": "user", "content": "Hi"}]
        assert prompt_of(trusting, chat, chat_template=template) == "judge=;user=Hi;"
    assert texts_of(ask(server, [{"role": "user", "content": None}, CHAT[1]]))[0]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_last_message_if_the_answer_goes_on_with_it(server, stream):
    start = {"role": "assistant", "content": ["Once upon a time", {"type": "text", "text": "there was"}]}
    fields = {"continue_final_message": True, "add_generation_prompt": False, "stream": stream}
    [text] = texts_of(ask(server, [CHAT[1], start], **fields))
    assert texts_of(ask(server, [CHAT[1], start], echo=True, **fields)) == ["Once upon a time\nthere was" + text]
    assert texts_of(ask(server, echo=True, stream=stream)) == texts_of(ask(server))


def test_without_a_generation_prompt_the_answer_has_the_last_messages_role(server):
    answer = ask(server, add_generation_prompt=False)
    assert answer["choices"][0]["message"]["role"] == "user"


def test_a_developer_is_the_system_to_a_template_that_knows_none(server):
    developer = [{**CHAT[0], "role": "developer"}, CHAT[1]]
    assert prompt_of(server, developer) == prompt_of(server, CHAT)


def test_tool_messages_and_calls_reach_the_template(server):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [CHAT[1], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    prompt = prompt_of(server, messages)
    assert '"city": "Rome"' in prompt
    assert "<tool_response>\nsunny" in prompt


def test_tools_that_may_not_be_called_reach_the_template(server):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    with_tools = ask(server, tools=tools, tool_choice="none")
    assert with_tools["usage"]["prompt_tokens"] > ask(server)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_final_message_can_be_continued(server, offline, stream):
    messages = [CHAT[1], {"role": "assistant", "content": "Once upon a time there was a"}]
    arguments = {"continue_final_message": True, "add_generation_prompt": False}
    said = texts_of(ask(server, messages, **arguments, stream=stream))
    assert said == offline_texts(offline, messages, **arguments)
    assert texts_of(ask(server, messages, continue_final_message=True)) == said


def test_without_a_generation_prompt_the_prompt_is_shorter(server):
    assert prompt_of(server, CHAT).startswith(prompt_of(server, CHAT, add_generation_prompt=False))


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_openais_shape_and_the_offline_engines_values(server, offline, stream):
    [output] = offline.chat(CHAT, GREEDY.clone(logprobs=3, max_tokens=5), use_tqdm=False)
    answer = ask(server, logprobs=True, top_logprobs=3, max_tokens=5, stream=stream)
    choices = [c for event in (answer if stream else [answer]) for c in event["choices"]]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    [completion] = output.outputs
    token_bytes = offline.frontend.tokenizer.token_bytes
    assert len(content) == 5
    for entry, token, place in zip(content, completion.token_ids, completion.logprobs, strict=True):
        assert entry["token"] == place[token].decoded_token
        assert entry["logprob"] == pytest.approx(place[token].logprob, abs=1e-4)
        assert entry["bytes"] == list(token_bytes[token])
        assert len(entry["top_logprobs"]) == 3
        ranked = sorted(place.values(), key=lambda value: value.rank)
        assert [top["token"] for top in entry["top_logprobs"]] == [value.decoded_token for value in ranked[:3]]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_named_tokens_stand_in_place_of_the_likeliest(server, offline, stream):
    named = [1000, 20, 1000, 300]
    params = GREEDY.clone(max_tokens=3, logprob_token_ids=named)
    [output] = offline.chat(CHAT, params, use_tqdm=False)
    answer = ask(server, logprobs=True, logprob_token_ids=named, top_logprobs=1, max_tokens=3, stream=stream)
    choices = [c for event in (answer if stream else [answer]) for c in event["choices"]]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    for entry, place in zip(content, output.outputs[0].logprobs, strict=True):
        expected = [(value.decoded_token, pytest.approx(value.logprob, abs=1e-4)) for value in place.values()]
        assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == expected
        assert len(expected) == 4


def test_logprobs_without_top_ones_have_an_empty_list(server):
    [choice] = ask(server, logprobs=True, max_tokens=2)["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_and_token_ids_stand_beside_the_choices(server, stream):
    answer = ask(server, prompt_logprobs=0, return_token_ids=True, max_tokens=4, stream=stream)
    first = answer[0] if stream else answer
    assert len(first["prompt_logprobs"]) == len(first["prompt_token_ids"])
    choices = [c for event in (answer if stream else [answer]) for c in event["choices"]]
    assert len([token for choice in choices for token in choice.get("token_ids", [])]) == 4


def test_reasoning_effort_reaches_templates_with_degrees_and_with_a_switch(host: Host):
    template = "{% for m in messages %}{{ reasoning_effort }} {{ enable_thinking }}{% endfor %}"
    trusting = host.serve(trust_request_chat_template=True)
    for effort, kwargs, expected in (
        ("high", {}, "high True"),
        ("none", {}, "none False"),
        ("low", {"enable_thinking": False}, "low False"),
        (None, {"enable_thinking": True}, " True"),
    ):
        fields = {"reasoning_effort": effort, "chat_template": template, "chat_template_kwargs": kwargs}
        assert prompt_of(trusting, CHAT[:1], **fields).strip() == expected.strip()


def test_a_template_of_a_request_needs_the_servers_trust(server, host: Host):
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ mood }}"
    fields = {"messages": CHAT, "chat_template": template, "chat_template_kwargs": {"mood": "glad"}}
    assert server.post("/v1/chat/completions", fields).error["param"] == "chat_template"
    trusting = host.serve(trust_request_chat_template=True)
    assert prompt_of(trusting, **fields) == "Be brief.|Tell me a story about a dog.|glad"
    fields["chat_template"] = "/etc/hostname"
    assert trusting.post("/tokenize", fields).error["param"] == "chat_template"
    fields["chat_template"] = "{{ 1 / 0 }}"
    assert "chat template failed" in trusting.post("/tokenize", fields).error["message"]


def test_tokenize_and_detokenize_are_each_others_inverse(server, offline):
    text = "Grüße, 世界! 🦊 once upon a time"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert answer["tokens"] == offline.get_tokenizer().encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": text}
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}
