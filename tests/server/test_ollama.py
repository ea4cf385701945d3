"""Ollama's API, against the same model offline and the other APIs."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from quire.messages.sampling_params import SamplingParams
from quire.server.ollama.generate import OllamaChatRequest
from support.dictation import CALLS, THOUGHT
from support.server import Answer, Host, Service, eventually

USER = {"role": "user", "content": "Tell me a story about a dog."}
SYSTEM = {"role": "system", "content": "Be brief."}
OPTIONS = {"temperature": 0, "num_predict": 24}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": {}}}
ENDLESS = " ".join("1" * 15)  # the bundled model goes on with it until the context ends


def lines_of(answer: Answer):
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/x-ndjson"
    *lines, rest = answer.body.decode().split("\n")
    assert rest == ""
    return [json.loads(line) for line in lines]


def text_of(part) -> str:
    return part["message"]["content"] if "message" in part else part["response"]


def ask(server: Service, path: str, *, stream: bool, **fields):
    """(text, last line of the answer)"""
    body = {"model": "demo", "options": OPTIONS, **fields}
    if not stream:
        answer = server.post(path, {**body, "stream": False})
        assert answer.status == 200, answer.body
        return text_of(answer.json), answer.json
    *parts, last = lines_of(server.post(path, body))
    assert all(part["done"] is False for part in parts)
    assert text_of(last) == ""
    return "".join(map(text_of, parts)), last


def refused(server: Service, path: str, fields, status=400) -> str:
    answer = server.post(path, {"options": OPTIONS, **fields})
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert answer.json.keys() == {"error"}
    return answer.json["error"]


def offline_chat(offline, messages):
    [output] = offline.chat(messages, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    return output.outputs[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_and_a_generation_say_what_the_offline_engine_says(server, offline, stream):
    expected = offline_chat(offline, [SYSTEM, USER])
    chat, last = ask(server, "/api/chat", messages=[SYSTEM, USER], stream=stream)
    generated, _ = ask(server, "/api/generate", system=SYSTEM["content"], prompt=USER["content"], stream=stream)
    assert chat == generated == expected
    assert last["message"]["role"] == "assistant"


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_has_the_reason_the_counts_and_the_times(server, stream):
    _, last = ask(server, "/api/chat", messages=[USER], stream=stream)
    assert (last["model"], last["done"], last["done_reason"]) == ("demo", True, "length")
    assert datetime.fromisoformat(last["created_at"]).tzinfo
    assert last["prompt_eval_count"] == server.post("/tokenize", {"messages": [USER]}).json["count"]
    assert last["eval_count"] == 24
    assert last["load_duration"] == 0
    assert 0 < last["prompt_eval_duration"] < last["total_duration"] < 60e9
    assert 0 <= last["eval_duration"] < last["total_duration"]
    _, last = ask(server, "/api/generate", prompt="Hello", stream=stream, options={"temperature": 0})
    assert last["done_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_raw_prompt_is_continued_without_the_template(server, stream):
    expected = server.complete("Once upon a", max_tokens=24)["choices"][0]["text"]
    text, last = ask(server, "/api/generate", prompt="Once upon a", raw=True, stream=stream)
    assert text == expected
    assert last["prompt_eval_count"] == server.post("/tokenize", {"prompt": "Once upon a"}).json["count"]


def test_options_have_their_effect(server):
    def text(**options):
        return ask(server, "/api/chat", messages=[USER], stream=False, options={**OPTIONS, **options})[0]

    whole = text()
    assert text(stop=" there") == text(stop=["never", " there"]) == whole.partition(" there")[0]
    assert text(temperature=5, top_k=1) == text(temperature=5, min_p=1) == whole
    assert text(temperature=2, seed=3) == text(temperature=2, seed=3)
    chat = {"repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 1, "max_tokens": 24}
    expected = server.chat(USER["content"], **chat)["choices"][0]["message"]["content"]
    assert text(repeat_penalty=1.8, presence_penalty=0.5, frequency_penalty=1) == expected != whole


@pytest.mark.sampled(4)
@pytest.mark.parametrize("limit", [-1, -2, 0, None])
def test_without_a_limit_the_answer_is_as_long_as_the_model_recommends(server, limit):
    messages = [USER, {"role": "assistant", "content": ENDLESS}, {"role": "user", "content": ENDLESS}]
    expected = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0}).json["usage"]
    options = {"temperature": 0, "num_predict": limit}
    _, last = ask(server, "/api/chat", messages=messages, stream=False, options=options)
    assert last["eval_count"] == expected["completion_tokens"]


def test_logprobs_stand_beside_each_part(server):
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "options": OPTIONS}
    whole = server.post("/api/chat", {**body, "stream": False}).json["logprobs"]
    parts = lines_of(server.post("/api/chat", body))
    assert [entry for part in parts for entry in part.get("logprobs", [])] == whole
    assert len(whole) == 24
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)


@pytest.mark.parametrize(("path", "fields"), [("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})])
def test_a_request_without_a_prompt_loads_or_unloads_the_model(server, path, fields):
    loads = [{}, fields, {**fields, "keep_alive": -1}, {**fields, "keep_alive": "1h30m"}]
    unloads = [{**fields, "keep_alive": keep_alive} for keep_alive in (0, "0s")]
    for body in loads + unloads:
        reason = "unload" if body in unloads else "load"
        answer = server.post(path, {"model": "demo", **body}).json
        assert (answer["done"], answer["done_reason"], text_of(answer)) == (True, reason, "")
    # Clients may not unload this server's model.
    assert server.get("/api/ps").json["models"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_continues_a_conversation(server, stream):
    first, last = ask(server, "/api/generate", prompt=USER["content"], stream=stream)
    context = last["context"]
    assert len(context) == last["prompt_eval_count"] + last["eval_count"]
    assert server.post("/detokenize", {"tokens": context}).json["prompt"].endswith(first)
    second, last = ask(server, "/api/generate", prompt="And then?", context=context, stream=stream)
    rest = server.post("/tokenize", {"messages": [{"role": "user", "content": "And then?"}]}).json["tokens"]
    assert last["prompt_eval_count"] == len(context) + len(rest)
    assert last["context"][: last["prompt_eval_count"]] == [*context, *rest]
    expected = server.complete([*context, *rest], max_tokens=24)["choices"][0]["text"]
    assert second == expected
    assert "context" not in ask(server, "/api/generate", prompt="a", raw=True, stream=stream)[1]


def test_a_template_of_a_request_is_taken_from_trusted_clients(server, host: Host):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    message = refused(server, "/api/generate", {"prompt": "Once upon a", "template": template})
    assert message.startswith("template: ")
    assert "--trust-request-chat-template" in message
    trusting = host.serve(trust_request_chat_template=True)
    text, _ = ask(trusting, "/api/generate", prompt="Once upon a", template=template, stream=False)
    assert text == server.complete("Once upon a", max_tokens=24)["choices"][0]["text"]


def test_models_have_the_tag_latest(host: Host, server):
    tagged = host.serve(served_model_name=["team/demo", "demo:small"])
    for path in ("/api/tags", "/api/ps"):
        models = tagged.get(path).json["models"]
        assert [model["name"] for model in models] == ["team/demo:latest", "demo:small"]
        assert all(model["name"] == model["model"] and model["size"] > 0 for model in models)
        assert models[0]["details"]["family"] == "qwen3"
    for name in ("team/demo", "team/demo:latest", "demo:small"):
        answer = tagged.post("/api/generate", {"model": name, "prompt": "a", "stream": False, "options": OPTIONS})
        assert answer.json["model"] == name
        assert tagged.post("/api/show", {"model": name}).status == 200
    for name in ("team/demo:small", "demo", "demo:small:latest:latest", "latest"):
        for path in ("/api/generate", "/api/chat", "/api/show"):
            assert "does not exist" in refused(tagged, path, {"model": name}, status=404)


def test_a_model_is_described(server, offline):
    shown = server.post("/api/show", {"name": "demo"}).json
    info = shown["model_info"]
    assert (info["general.architecture"], info["general.parameter_count"]) == ("qwen3", 4492672)
    assert (info["qwen3.context_length"], info["qwen3.vocab_size"]) == (2048, 4096)
    assert info["qwen3.block_count"] > 0
    assert info["qwen3.attention.head_count"] >= info["qwen3.attention.head_count_kv"]
    assert shown["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "qwen3",
        "families": ["qwen3"],
        "parameter_size": "4.49M",
        "quantization_level": "BF16",
    }
    assert shown["template"] == offline.get_tokenizer().chat_template
    assert "completion" in shown["capabilities"]
    assert shown["modelfile"].startswith("# Generated by Quire")
    assert "FROM demo" in shown["modelfile"]
    assert datetime.fromisoformat(shown["modified_at"]).tzinfo
    [model] = server.get("/api/tags").json["models"]
    assert model["details"] == shown["details"]
    assert model["modified_at"] == shown["modified_at"]
    assert model["size"] > 9_000_000
    assert len(bytes.fromhex(model["digest"])) == 32
    [loaded] = server.get("/api/ps").json["models"]
    assert {name: loaded[name] for name in model} == model
    assert (loaded["size_vram"], loaded["context_length"]) == (0, 2048)
    assert datetime.fromisoformat(loaded["expires_at"]).year == 9999


def test_clients_find_out_whether_the_server_is_there(server, host: Host):
    without_page = host.serve(disable_ui=True)
    for service in (server, without_page):
        for path in ("/", "/api/version", "/api/tags"):
            answer = service.request("HEAD", path)
            assert (answer.status, answer.body) == (200, b"")
    assert without_page.get("/").body == b"Quire is running"
    assert server.get("/api/version").json["version"].count(".") == 2


def test_an_empty_list_of_tools_is_none(server):
    """The package for Python always sends one."""
    assert ask(server, "/api/chat", messages=[USER], tools=[], stream=False)[0]


def test_calls_and_results_of_tools_become_openais_messages(server):
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "thinking": "Two cities.", "tool_calls": [call, {**call, "id": "x"}]},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
        {"role": "tool", "content": "cloudy", "tool_name": "weather"},
    ]
    chat = OllamaChatRequest.model_validate({"messages": messages}).chat()
    function = {"name": "weather", "arguments": '{"city":"Rome"}'}
    calls = [{"id": id, "type": "function", "function": function} for id in ("call00000", "x")]
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        USER,
        {"role": "assistant", "content": "", "reasoning": "Two cities.", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_call_id": "call00000", "name": "weather"},
        {"role": "tool", "content": "cloudy", "tool_call_id": "x", "name": "weather"},
    ]
    assert ask(server, "/api/chat", messages=messages, stream=False)[1]["done"]


SAID = THOUGHT + CALLS


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_tool_calls_are_separated_from_the_answer(parrot, stream):
    body = {"messages": [{"role": "user", "content": SAID}], "tools": [TOOL], "think": True}
    answer = parrot.post("/api/chat", {**body, "stream": stream})
    messages = [part["message"] for part in lines_of(answer)] if stream else [answer.json["message"]]
    assert {message["role"] for message in messages} == {"assistant"}
    assert "".join(message.get("thinking", "") for message in messages).strip() == "It is a city."
    assert "".join(message["content"] for message in messages).strip() == "I will look."
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert len({call.pop("id") for call in calls}) == 2
    assert calls == [
        {"function": {"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}},
        {"function": {"name": "weather", "arguments": {}}},
    ]
    text, last = ask(parrot, "/api/generate", prompt=SAID.partition("<tool")[0].strip(), stream=stream, options={})
    assert text.strip() == "I will look."
    assert last["done_reason"] == "stop"


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CLOSED = {**SCHEMA, "additionalProperties": False}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), [("/api/chat", {"messages": [USER]}), ("/api/generate", {"prompt": "a"})])
def test_a_format_decides_what_the_answer_looks_like(server, path, fields, stream):
    text, _ = ask(server, path, **fields, format=CLOSED, stream=stream, options={"temperature": 0})
    assert json.loads(text)["city"] in ("Paris", "Rome")
    text, last = ask(server, path, **fields, format="json", stream=stream, options={"temperature": 0})
    assert last["done_reason"] == "length" or isinstance(json.loads(text), dict)
    impossible = {"type": "object", "properties": {"city": {"pattern": "(?=a)b"}}}
    assert refused(server, path, {**fields, "format": impossible, "stream": stream}).startswith("format: ")


def test_a_raw_prompt_can_have_a_format(server):
    text, _ = ask(server, "/api/generate", prompt="The city of", raw=True, format=CLOSED, stream=False)
    assert json.loads(text)["city"] in ("Paris", "Rome")


def test_a_model_that_does_not_think_is_not_told_to(server, parrot):
    for path in ("/api/chat", "/api/generate"):
        for think in (True, "high"):
            body = {"messages": [USER], "prompt": "a", "think": think}
            assert "does not support thinking" in refused(server, path, body)
    assert ask(server, "/api/chat", messages=[USER], think=False, stream=False)[0]
    assert server.post("/api/show", {"model": "demo"}).json["capabilities"] == ["completion", "tools"]
    assert parrot.post("/api/show", {"model": "demo"}).json["capabilities"] == ["completion", "tools", "thinking"]


CHAT_ERRORS = [
    ({"messages": 5}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [USER, {**USER, "images": ["aGk="]}]}, "messages[1].images"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"tools": 5}, "tools"),
]
GENERATE_ERRORS = [
    ({"prompt": 5}, "prompt"),
    ({"suffix": "the end"}, "suffix"),
    ({"template": "{{ .Prompt }}"}, "template"),
    ({"context": ["a"]}, "context[0]"),
    ({"context": [10**6]}, "context"),
    ({"context": [1], "raw": True}, "context"),
    ({"images": ["aGk="], "suffix": "b"}, "images"),
    ({"images": ["aGk="]}, "images"),
    ({"raw": "maybe"}, "raw"),
]
ERRORS = [
    ({"options": {"num_predict": 5000}}, "options.num_predict"),
    ({"options": {"num_predict": "many"}}, "options.num_predict"),
    ({"options": {"temperature": -1}}, "options.temperature"),
    ({"options": {"top_k": 0.5}}, "options.top_k"),
    ({"options": {"top_p": 2}}, "options.top_p"),
    ({"options": {"min_p": "x"}}, "options.min_p"),
    ({"options": {"seed": 2**63}}, "options.seed"),
    ({"options": {"stop": 5}}, "options.stop"),
    ({"options": {"stop": ["a", ""]}}, "options.stop"),
    ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ({"options": []}, "options"),
    ({"format": "yaml"}, "format"),
    ({"stream": "slowly"}, "stream"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"keep_alive": "soon"}, "keep_alive"),
    ({"keep_alive": "5 m"}, "keep_alive"),
]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        *(("/api/chat", *case) for case in CHAT_ERRORS + ERRORS),
        *(("/api/generate", *case) for case in GENERATE_ERRORS + ERRORS),
    ],
)
def test_a_wrong_field_is_named(server, host: Host, path, fields, name):
    assert name in refused(server, path, {"prompt": "a", "messages": [USER], **fields})
    eventually(lambda: host.is_idle)


def test_a_prompt_that_cannot_fit_is_refused_with_its_length(server):
    long = "word " * 1_000_000
    for path, fields in (
        ("/api/chat", {"messages": [{"role": "user", "content": long}]}),
        ("/api/generate", {"prompt": long}),
        ("/api/generate", {"prompt": long, "raw": True}),
    ):
        assert "max_model_len is 2048" in refused(server, path, fields)


def test_an_error_within_a_stream_is_its_last_line(host: Host):
    body = {"prompt": ENDLESS, "raw": True, "options": {"temperature": 0, "num_predict": 1500}}
    answer = host.post_until_time_is_up("/api/generate", body)
    *parts, last = lines_of(answer)
    assert parts
    assert last.keys() == {"error"}
    assert "not finished within" in last["error"]


def test_options_that_quire_does_not_have_are_logged_once(server, caplog):
    for _ in range(2):
        ask(server, "/api/chat", messages=[USER], stream=False, options={**OPTIONS, "num_ctx": 4096, "n": 5}, mood="x")
    for name in ("options.num_ctx", "options.n", "mood"):
        assert caplog.text.count(f"Ignored a field that is not known: '{name}'") == 1
    assert "keep_alive" not in caplog.text


def test_a_model_that_generates_makes_no_embeddings(server):
    for path, body in (("/api/embed", {"input": "a"}), ("/api/embeddings", {"prompt": "a"})):
        answer = server.post(path, body)
        assert (answer.status, "--runner pooling" in answer.json["error"]) == (400, True)
