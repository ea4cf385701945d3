"""What clients send stays out of the log of a real server, and cannot forge a line of it."""

from __future__ import annotations

import copy
import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.server import eventually
from support.server_process import Server
from support.waiting import LONGEST

MARK = "shibboleth"
TEXT = f"The {MARK} of the old house"
ARGUMENTS = json.dumps({"a": TEXT})
FUNCTION = {"name": "look", "description": TEXT, "parameters": {"type": "object", "description": TEXT}}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
SAMPLING = {"stop": [TEXT], "bad_words": [TEXT], "structured_outputs": {"choice": [TEXT]}}

# Requests that are right, with the mark wherever there is text.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2, "echo": True, **SAMPLING},
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": TEXT},
            {"role": "user", "content": [{"type": "text", "text": TEXT}]},
            {"role": "assistant", "content": TEXT, "tool_calls": [CALL]},
            {"role": "tool", "content": TEXT, "tool_call_id": "a"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "documents": [{"text": TEXT}],
        "chat_template_kwargs": {"note": TEXT},
        "max_tokens": 2,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "a", "output": TEXT},
        ],
        "instructions": TEXT,
        "metadata": {"note": TEXT},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object", "description": TEXT}}},
        "max_output_tokens": 2,
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": TEXT}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": TEXT},
                    {"type": "tool_use", "id": "a", "name": "look", "input": {"a": TEXT}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": TEXT}]},
        ],
        "system": TEXT,
        "stop_sequences": [TEXT],
        "max_tokens": 2,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": TEXT}], "system": TEXT},
    "/api/generate": {"prompt": TEXT, "system": TEXT, "stream": False, "options": {"num_predict": 2, "stop": [TEXT]}},
    "/api/chat": {
        "messages": [{"role": "user", "content": TEXT}],
        "format": {"type": "object", "description": TEXT},
        "stream": False,
        "options": {"num_predict": 2},
    },
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, **SAMPLING}},
    "/tokenize": {"prompt": TEXT},
    "/v1/prefixes": {"prompt": TEXT * 10},
}

# Fields that are added to all bodies, and what takes the place of each value in them.
ADDED: list[dict[str, Any]] = [
    {"stream": True},
    {"temperature": -1},
    {"max_tokens": 10**6},
    {"bad_words": ["", TEXT]},
    {"structured_outputs": {"regex": f"({TEXT}"}},
    {"structured_outputs": {"grammar": TEXT}},
    {"structured_outputs": {"structural_tag": TEXT}},
    {"structured_outputs": {"json": TEXT}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": TEXT}}}},
    {"chat_template": f"{{{{ '{TEXT}' | int(base='{TEXT}') }}}}"},
    {"chat_template": f"{{{{ raise_exception('{TEXT}') }}}}"},
    {"chat_template": f"{{{{ {TEXT}"},
    {"unheard_of": TEXT},
    {"user": TEXT},
    {"cache_salt": TEXT},
    {"vllm_xargs": {"note": TEXT}},
]
INSTEAD: list[Any] = [5, {"type": TEXT, "role": TEXT, "content": TEXT}, [TEXT]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--log-level", "DEBUG", "--response-store", "memory", "--enable-admin-api")
    with Server(*options, "--trust-request-chat-template") as server:
        yield server


class Client:
    """Sends requests on one connection."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(*server.host_and_port, timeout=LONGEST)
        self.statuses: set[int] = set()

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> int:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("POST", path, data, {"Content-Type": "application/json", **named})
        response = self._connection.getresponse()
        response.read()
        self.statuses.add(response.status)
        return response.status


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in an object: the keys and indices that lead there."""
    if path:
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from places(part, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], new: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    owner = body
    for step in path[:-1]:
        owner = owner[step]
    owner[path[-1]] = new
    return body


def whole_log(server: Server, client: Client) -> str:
    """The log up to the end of the client's last request."""
    client.post("/v1/completions", b"{", X_Request_Id="the-last")
    eventually(lambda: "request the-last" in server.log)
    return server.log


@pytest.mark.slow
def test_no_text_of_a_prompt_or_an_answer_is_logged(server: Server):
    client = Client(server)
    for path, body in BODIES.items():
        assert client.post(path, body) < 300, path
        for fields in ADDED:
            client.post(path, {**body, **fields})
        for place in places(body):
            for value in INSTEAD:
                client.post(path, changed(body, place, value))
        encoded = json.dumps(body).encode()
        for broken in (
            encoded[:-5],
            TEXT.encode(),
            encoded.replace(b"house", b"\xff"),
            encoded.replace(b"h", b"\\u0000"),
        ):
            client.post(path, broken)
    log = whole_log(server, client)
    assert client.statuses == {200, 400}
    assert MARK not in log


FORGED = "x\n12:00:00 ERROR   forged \x1b[2K\r\u2028\x85y"


def test_nothing_that_a_client_writes_can_forge_a_line(server: Server):
    client = Client(server)
    for path, body in BODIES.items():
        for fields in ({"model": FORGED}, {FORGED: 1}, {"request_id": FORGED}, {"user": FORGED}, {"stop": [FORGED]}):
            client.post(path, {**body, **fields})
        client.post(path, body, X_Request_Id="x\t12:00:00 ERROR   forged \x1b[2K\x85")
        client.post(path, json.loads(json.dumps(body).replace(MARK, json.dumps(FORGED)[1:-1])))
    client.post("/v2/%0a12:00:00%20ERROR%20%20%20forged%1b", {})
    client.post("/v1/completions", {"prompt": "a", "temperature": -1}, User_Agent="a\tb\x1b")
    log = whole_log(server, client)
    assert "forged" in log
    for line in log.splitlines():
        assert line.isprintable()
        assert re.match(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) |    ", line), line
        assert not line.startswith("12:00:00 ERROR   forged")
