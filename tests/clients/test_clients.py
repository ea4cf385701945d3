"""Clients that people use ask a real server from an environment of their own."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.client_environment import clients_python
from support.server_process import Server
from support.waiting import LONGEST

HERE = Path(__file__).parent
CLIENTS = ["openai", "langchain", "litellm", "llama_index", "llm"]
KEY, PROMPT, TOKENS = "sk-test", "Tell me a story about a brave little boat.", 24
COMMON = {
    "chat", "chat/stream", "chat/async", "completion", "completion/stream", "chat usage",
    "unknown model", "long prompt",
}  # fmt: skip

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
    """What the server says without any client."""
    chat = post(server, "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}])
    completion = post(server, "/v1/completions", prompt=PROMPT)
    return {
        "model": chat["model"],
        "chat": chat["choices"][0]["message"]["content"],
        "completion": completion["choices"][0]["text"],
        "chat usage": [chat["usage"]["prompt_tokens"], TOKENS],
        "completion usage": [completion["usage"]["prompt_tokens"], TOKENS],
        "models": [chat["model"]],
        "keys that are not null": [],
    }


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_every_answer_and_error(server, expected, client):
    question = {
        "url": f"{server.url}/v1", "key": KEY, "model": expected["model"], "prompt": PROMPT,
        "long_prompt": "word " * 4000, "tokens": TOKENS,
    }  # fmt: skip
    process = subprocess.run(
        [clients_python(), HERE / f"ask_{client}.py"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    assert process.returncode == 0, process.stderr
    answers = json.loads(process.stdout.splitlines()[-1])
    assert answers.keys() >= COMMON
    unknown_model, long_prompt = answers.pop("unknown model"), answers.pop("long prompt")
    assert answers == {name: expected[name.partition("/")[0]] for name in answers}  # "chat/stream" is what "chat" is
    assert "NotFoundError" in unknown_model or "Error code: 404" in unknown_model
    assert "the model 'no' does not exist" in unknown_model
    assert "BadRequestError" in long_prompt or "Error code: 400" in long_prompt
    assert "2048" in long_prompt
