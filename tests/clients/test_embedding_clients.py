"""Clients that people use for embeddings, asking a real server from the environment of test_clients.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from clients.test_clients import HERE, KEY

from quire import LLM
from support.client_environment import clients_python
from support.minilm import minilm
from support.server_process import Server
from support.waiting import LONGEST

pytestmark = pytest.mark.slow
TEXTS = ["How do trees grow?", "Trees grow by cell division.", "The tax law of 1986.", "A forest has many trees."]


def test_every_client_gets_the_same_vectors():
    model = str(minilm())
    llm = LLM(model)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    vectors = np.array([output.outputs.embedding for output in outputs])
    with Server("--model", model, "--served-model-name", "minilm", "--api-key", KEY) as server:
        question = json.dumps([server.url, KEY, "minilm", TEXTS])
        process = subprocess.run(
            [clients_python(), Path(HERE) / "ask_for_embeddings.py"],
            input=question,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
    assert process.returncode == 0, process.stderr
    answers = json.loads(process.stdout.splitlines()[-1])
    for name in ("openai", "openai, base64", "langchain", "llama-index", "cohere"):
        np.testing.assert_allclose(answers[name], vectors, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(answers["langchain, query"], vectors[0], atol=1e-6)
    short = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(answers["openai, dimensions"], short, atol=1e-6)
    cosines = vectors[1:] @ vectors[0]
    best = np.argsort(-cosines)[:2]
    assert answers["cohere, rerank"] == [[int(i), pytest.approx(float(cosines[i]), abs=1e-5)] for i in best]
    assert answers["usage"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert answers["error"] == "NotFoundError"
