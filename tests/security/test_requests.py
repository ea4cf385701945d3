"""Requests that would harm the server or other clients: deep JSON, unprintable names, other clients' requests. And idle
streams."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.config.engine import ConfigError
from quire.server.batch import _fields
from support.attacks import body, steady_memory, witness
from support.server import Host, Service, eventually

DEEP = "[" * 100_000
OBJECTS = '{"a":' * 100_000
CALL = {"id": "call00001", "type": "function"}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=64 << 20)
    yield host
    host.close()


@pytest.fixture(scope="module")
def server(host: Host) -> Iterator[Service]:
    server = host.serve(response_store="memory")
    usual = [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": chat("[]")})]
    with steady_memory(lambda: [server.post(path, {**body, "max_tokens": 1}) for path, body in usual]):
        yield server


# ---- deep JSON: a 400 that names the field, on each API


def chat(arguments: str) -> list[dict]:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]


def items(arguments: str) -> list[dict]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    return [{"role": "user", "content": "a"}, call]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", lambda a: {"messages": chat(a)}, "messages[1].tool_calls[0].function.arguments"),
        ("/tokenize", lambda a: {"messages": chat(a)}, "messages[1].tool_calls[0].function.arguments"),
        ("/v1/responses", lambda a: {"input": items(a)}, "input"),
    ],
    ids=["chat", "tokenize", "responses"],
)
def test_arguments_that_are_nested_too_deeply_are_refused(server: Service, path, body, field):
    with witness(server):
        for arguments in (DEEP, OBJECTS, '{"a": ' + DEEP, "[" * 5000 + "]" * 5000):
            answer = server.post(path, body(arguments))
            assert (answer.status, answer.error["param"]) == (400, field)
            assert len(answer.body) < 1000


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/abort_requests",
    ],
)
def test_bodies_that_are_nested_too_deeply_are_refused(server: Service, path):
    with witness(server):
        for field, inner in itertools.product(["prompt", "messages", "tools", "unknown"], [DEEP, OBJECTS]):
            body = f'{{"{field}": {inner}'.encode()
            answer = server.request("POST", path, body, Content_Type="application/json")
            assert answer.status == 400
            assert b"recursion limit" in answer.body


def test_schemas_and_tags_as_text_are_refused(server: Service):
    with witness(server):
        for field, text in itertools.product(["json", "structural_tag"], [DEEP, OBJECTS]):
            answer = server.post("/v1/completions", body(**{field: text}))
            assert (answer.status, answer.error["param"]) == (400, "structured_outputs")


def test_a_key_of_a_megabyte_is_not_repeated_in_the_error(server: Service):
    name = "x" * 1_000_000
    part = {"type": "text", "text": {name: 1}}
    attacks = {
        "/v1/completions": {"prompt": "a", "metadata": {}, "vllm_xargs": {name: {name: 1 << 70}}},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [part]}]},
    }
    with witness(server):
        for path, attack in attacks.items():
            answer = server.post(path, attack)
            assert answer.status == 400
            assert len(answer.body) < 2000


def test_lines_of_a_batch_are_read_as_bodies_are():
    assert _fields(b'{"stream": ' + DEEP.encode()).stream is None


def test_the_proxy_passes_on_what_it_cannot_read():
    from quire.router.call import Call

    assert Call("POST", "/v1/completions", [], b'{"prompt": ' + DEEP.encode(), "id").fields == {}


# ---- names that logs, metrics and lists show

WRONG_NAMES = ["", "x" * 257, "a\nb", "a\tb", "a\x1b[31mb", "a\u202eb", "a\u2028b", "\u200b", "a\u2066b", "\ue000"]


@pytest.mark.parametrize("name", WRONG_NAMES, ids=ascii)
def test_a_name_of_an_adapter_is_short_and_printable(server: Service, name):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = server.post(path, {"lora_name": name, "lora_path": "a"})
        assert (answer.status, answer.error["param"]) == (400, "lora_name"), path


def test_a_name_of_an_adapter_may_be_in_any_language(server: Service):
    for name in ("sql-lora", "org/name:latest", "модель", "模型 2", "x" * 256):
        assert server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "a"}).status == 403


def test_names_that_operators_give_are_checked_at_the_start(host: Host, monkeypatch):
    from quire.server.adapters import Adapters
    from quire.server.adapters import ServerConfig as Config

    adapters = Adapters(host.llm, Config(), ["demo"])
    monkeypatch.setattr(adapters, "_config", Config(lora_modules=["a\u202eb=/nowhere"]))
    with pytest.raises(ConfigError, match="printable"):
        host.run(adapters.start())


@pytest.mark.parametrize("name", [name for name in WRONG_NAMES if name])
def test_a_request_cannot_name_itself_so_that_a_log_is_unreadable(server: Service, name):
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": name})
    assert (answer.status, answer.error["param"]) == (400, "request_id")


# ---- other clients' requests

LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


@pytest.mark.parametrize("name", ["cmpl-mine", "mine"])
def test_only_the_key_that_sent_a_request_can_abort_it(host: Host, name):
    server = host.serve(api_key=["one", "two"])
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", LONG, X_Request_Id="mine", **one)
        eventually(lambda: len(server.app.state.server.calls) == 1)
        assert server.post("/abort_requests", {"request_ids": [name]}, **two).json == {"aborted": 0}
        assert server.post("/abort_requests", {"request_ids": [name]}, **one).json == {"aborted": 1}
        assert running.result().json["choices"][0]["finish_reason"] == "abort"


# ---- idle streams

CHAT = [{"role": "user", "content": "Tell me a story."}]
STREAMS = {
    "/v1/completions": (LONG, b": keep-alive\n\n"),
    "/v1/chat/completions": ({"messages": CHAT}, b": keep-alive\n\n"),
    "/v1/responses": ({"input": "Tell me a story.", "store": False}, b": keep-alive\n\n"),
    "/v1/messages": ({"messages": CHAT, "max_tokens": 20}, b'event: ping\ndata: {"type":"ping"}\n\n'),
    "/inference/v1/generate": ({"token_ids": [5, 6], "sampling_params": {}}, b": keep-alive\n\n"),
    "/api/chat": ({"messages": CHAT}, b'"message":{"role":"assistant","content":""},"done":false}\n'),
    "/api/generate": ({"prompt": "Tell me a story."}, b'"response":"","done":false}\n'),
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_whose_prompt_takes_long_gets_what_clients_ignore(host: Host, path):
    body, expected = STREAMS[path]
    server = host.serve(sse_keep_alive_interval=0.05)
    host.run(host.llm.pause_generation(mode="keep"))
    try:
        with server.connection(path, {**body, "stream": True}) as raw:
            data = b""
            while data.count(expected) < 3:
                piece = raw.recv(1 << 16)
                assert piece, data
                data += piece
            host.run(host.llm.resume_generation())
            assert data.startswith(b"HTTP/1.1 200")
    finally:
        host.run(host.llm.resume_generation())
    eventually(lambda: host.is_idle)


def test_a_stream_that_is_never_idle_gets_none(server: Service):
    for fields in ({"max_tokens": 30}, {"max_tokens": 1}):
        assert ": keep-alive" not in server.post("/v1/completions", {**LONG, **fields, "stream": True}).body.decode()


def test_an_error_after_the_first_comment_is_an_event_and_before_it_a_status(host: Host):
    server = host.serve(sse_keep_alive_interval=0.05, request_timeout=0.4)
    host.run(host.llm.pause_generation(mode="keep"))
    try:
        answer = server.post("/v1/completions", {**LONG, "stream": True})
    finally:
        host.run(host.llm.resume_generation())
    *_, error, done, _ = answer.body.decode().split("\n\n")
    assert answer.status == 200
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
    assert done == "data: [DONE]"
    assert server.post("/v1/completions", {**LONG, "stream": True, "max_tokens": 9000}).status == 400
