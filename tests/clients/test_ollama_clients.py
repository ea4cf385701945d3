"""Ollama's own clients, for Python and for JavaScript, with a real server for admins and a stand-in for the hub."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.test_clients import HERE, KEY, PROMPT, TOKENS, post

from quire.checkpoints.hub import bundled_model
from support.client_environment import clients_node, clients_python
from support.gguf_files import write_gguf
from support.hub import Hub, hub_environment
from support.minilm import minilm
from support.server_process import Server
from support.waiting import LONGEST

pytestmark = pytest.mark.slow
TEXTS = ["How do trees grow?", "The tax law of 1986."]
WEATHER, TOLD = "What is the weather in Paris?", '{"temperature": 21, "sky": "sunny"}'
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("repositories")
    shutil.copytree(bundled_model(), folder / "tiny" / "demo")
    with Hub(folder) as hub:
        yield hub


@pytest.fixture(scope="module")
def server(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = f"--dtype float32 --kv-cache-memory-bytes 256M --api-key {KEY} --enable-admin-api"
    environment = hub_environment(hub.address, tmp_path_factory.mktemp("home"))
    environment.pop("PYTHONPATH"), environment.pop("OMP_NUM_THREADS")
    with Server(*options.split(), **environment) as server:
        yield server


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    with Server("--model", str(minilm()), "--served-model-name", "all-minilm", "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def question(server: Server, embedder: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    gguf = write_gguf(bundled_model(), tmp_path_factory.mktemp("gguf") / "model.gguf", "Q8_0")
    return {
        "url": server.url,
        "embedder": embedder.url,
        "key": KEY,
        "model": "quire-demo",
        "pulled": "tiny/demo",
        "gguf": str(gguf),
        "prompt": PROMPT,
        "weather": WEATHER,
        "told": TOLD,
        "texts": TEXTS,
        "schema": {**SCHEMA, "additionalProperties": False},
    }


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_every_method_of_a_client_works(server, embedder, question, language):
    if language == "python":
        command: list[str | Path] = [clients_python(), HERE / "ask_ollama.py"]
    else:
        command = clients_node(HERE / "ask_ollama.mjs")
    process = subprocess.run(
        command, input=json.dumps(question), capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert process.returncode == 0, process.stderr
    answers = json.loads(process.stdout.splitlines()[-1])
    messages = [{"role": "user", "content": PROMPT}]
    expected = post(server, "/v1/chat/completions", messages=messages)["choices"][0]["message"]["content"]
    assert set(answers["texts"]) == {expected}
    assert answers.get("version", "1.2.3").count(".") == 2
    assert answers["logprobs"] == [TOKENS, 2]
    assert answers["end"] == [True, "length", TOKENS]
    assert answers["context"] is True
    assert answers["formatted"]["city"] in ("Paris", "Rome")
    assert answers["called"] == [["get_weather", {"city": "Paris"}]] * 2
    assert "sunny" in answers["told"]
    assert answers["shown"] == ["qwen3", "4.49M", 4492672]
    assert answers["capabilities"] == ["completion", "tools"]
    assert answers["created"] == ["success"] * 3
    assert {"quire-demo:latest", "brief:latest", "copied:latest"} <= set(answers["listed"])
    system = {"role": "system", "content": "Be brief."}
    brief = post(server, "/v1/chat/completions", messages=[system, *messages], max_tokens=5)
    assert answers["brief"] == [brief["choices"][0]["message"]["content"], 5]
    assert answers["deleted"] == ["success"] * 4
    size = (bundled_model() / "model.safetensors").stat().st_size
    assert answers["pulled"] == ["pulling manifest", size, size, "success", "success"]
    vectors = [item["embedding"] for item in post(embedder, "/v1/embeddings", input=TEXTS, max_tokens=None)["data"]]
    short = np.array(vectors)[:, :8]
    short /= np.linalg.norm(short, axis=1, keepdims=True)
    np.testing.assert_allclose(answers["embeddings"], short, atol=1e-6)
    direction = np.array(answers["embedding"]) / np.linalg.norm(answers["embedding"])
    np.testing.assert_allclose(direction, vectors[0], atol=1e-6)
    assert answers["embedding tokens"] > 0
    assert answers["residence"] == ["unload", 0, "load", "quire-demo:latest"]
    assert answers["unknown model"][0] == 404
    assert "the model 'no' does not exist" in answers["unknown model"][1]
    assert answers["unknown model/pull"][0] == 400
    for name in ("unknown model/pull", "unknown model/pull stream"):
        assert "the hub has no model 'no/such'" in answers[name][1]
    assert "--runner pooling" in answers["no embeddings"][1]
    assert "uploads no models" in answers["push"][1]
