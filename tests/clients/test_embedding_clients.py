"""Clients that people use for embeddings, asking a real server from the environment of test_clients.py."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.test_clients import HERE, KEY

from quire import LLM, PoolingRequestOutput
from support.client_environment import clients_node, clients_python
from support.minilm import minilm
from support.server_process import Server
from support.waiting import LONGEST

pytestmark = pytest.mark.slow
TEXTS = ["How do trees grow?", "Trees grow by cell division.", "The tax law of 1986.", "A forest has many trees."]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--model", str(minilm()), "--served-model-name", "minilm", "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def outputs() -> list[PoolingRequestOutput]:
    return LLM(str(minilm())).embed(TEXTS, use_tqdm=False)


@pytest.fixture(scope="module")
def vectors(outputs) -> np.ndarray:
    return np.array([output.outputs.embedding for output in outputs])


def ask(server: Server, command: list[str | Path]) -> dict[str, Any]:
    question = json.dumps([server.url, KEY, "minilm", TEXTS])
    process = subprocess.run(command, input=question, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert process.returncode == 0, process.stderr
    answers: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answers


def test_every_client_gets_the_same_vectors(server, outputs, vectors):
    answers = ask(server, [clients_python(), HERE / "ask_for_embeddings.py"])
    for name in ("openai", "openai, base64", "langchain", "langchain, ollama", "litellm", "llama-index", "cohere"):
        np.testing.assert_allclose(answers[name], vectors, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(answers["langchain, query"], vectors[0], atol=1e-6)
    short = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(answers["openai, dimensions"], short, atol=1e-6)
    cosines = vectors[1:] @ vectors[0]
    best = np.argsort(-cosines)[:2]
    assert answers["cohere, rerank"] == [[int(i), pytest.approx(float(cosines[i]), abs=1e-5)] for i in best]
    assert answers["usage"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert answers["error"] == "NotFoundError"


def test_every_client_for_node_gets_the_same_vectors(server, vectors):
    answers = ask(server, clients_node(HERE / "ask_for_embeddings.mjs"))
    assert answers.keys() == {"openai", "openai, base64", "ai"}
    for name, found in answers.items():
        np.testing.assert_allclose(found, vectors, atol=1e-6, err_msg=name)
