"""Clients that people use ask a real server from an environment of their own. docs/apis.md has a table of them."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from support.chats import WEATHER
from support.client_environment import REQUIREMENTS, clients_node, clients_python
from support.client_table import Row, checks_of, client_rows
from support.server_process import Server
from support.waiting import LONGEST

HERE = Path(__file__).parent
KEY, PROMPT, TOKENS = "sk-test", "Tell me a story about a brave little boat.", 24
QUESTION, SKY, GREETING = "What is the weather in Paris?", '{"temperature": 21, "sky": "sunny"}', "Who are you?"
ELSEWHERE = {"ask_ollama.py", "ask_ollama.mjs", "ask_for_embeddings.py", "ask_for_embeddings.mjs"}
CLIENTS = {row.script.removeprefix("ask_"): row for row in client_rows() if row.script not in ELSEWHERE}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*f"--dtype float32 --kv-cache-memory-bytes 256M --api-key {KEY}".split()) as server:
        yield server


def post(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"max_tokens": TOKENS, "temperature": 0, **fields}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(server.url + path, body, headers), timeout=LONGEST) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, Any]:
    """What the server answers without any client."""

    def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return post(server, "/v1/chat/completions", messages=messages, **fields)

    def text(answer: dict[str, Any]) -> str:
        content: str = answer["choices"][0]["message"]["content"]
        return content

    story = chat({"role": "user", "content": PROMPT})
    completion = post(server, "/v1/completions", prompt=PROMPT)
    generated = chat({"role": "user", "content": f"### User:\n{PROMPT}\n\n"})  # as litellm writes it for Ollama
    weather = {"role": "user", "content": QUESTION}
    called = chat(weather, tools=[WEATHER])["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": SKY}
    told = text(chat(weather, called, result, tools=[WEATHER]))
    assert "sunny" in told
    return {
        "model": story["model"],
        "chat": text(story),
        "greeting": text(chat({"role": "user", "content": GREETING})),
        "generate": text(generated),
        "completion": completion["choices"][0]["text"],
        "chat usage": [story["usage"]["prompt_tokens"], TOKENS],
        "generate usage": [generated["usage"]["prompt_tokens"], TOKENS],
        "completion usage": [completion["usage"]["prompt_tokens"], TOKENS],
        "tools": [["get_weather", {"city": "Paris"}]],
        "result": told,
        "models": [story["model"]],
        "keys that are not null": [],
    }


def command_of(row: Row) -> list[str | Path]:
    if row.script.endswith(".mjs"):
        return clients_node(HERE / row.script)
    wanted = min(row.packages)
    [name, *_] = [
        name
        for name, file in REQUIREMENTS.items()
        if wanted in [Requirement(line).name for line in file.read_text().splitlines() if not line.startswith("#")]
    ]
    return [clients_python(name), HERE / row.script]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_every_answer_and_error(server, expected, client):
    question = {
        "url": f"{server.url}/v1",
        "key": KEY,
        "model": expected["model"],
        "prompt": PROMPT,
        "long_prompt": "word " * 4000,
        "tokens": TOKENS,
        "weather": QUESTION,
        "sky": SKY,
        "greeting": GREETING,
    }
    process = subprocess.run(
        command_of(CLIENTS[client]), input=json.dumps(question), capture_output=True, text=True, timeout=LONGEST
    )
    assert process.returncode == 0, process.stderr
    answers = json.loads(process.stdout.splitlines()[-1])
    assert checks_of(answers.keys()) == CLIENTS[client].checks
    kinds = {name: name.partition("/")[0] for name in answers}  # "chat/stream" is what "chat" is
    for name in [name for name, kind in kinds.items() if kind == "unknown model"]:
        error = answers.pop(name)
        assert re.search(r"NotFoundError|\b404\b", error), error
        assert "the model 'no' does not exist" in error
    for name in [name for name, kind in kinds.items() if kind == "long prompt"]:
        error = answers.pop(name)
        assert re.search(r"BadRequestError|\b400\b", error), error
        assert "2048" in error
    for name in [name for name, kind in kinds.items() if kind == "structured"]:
        assert answers.pop(name) in ("Paris", "Rome"), name
    assert answers == {name: expected[kinds[name]] for name in answers}
