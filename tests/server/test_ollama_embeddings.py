"""/api/embed and /api/embeddings of Ollama's API, with a real model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from quire import LLM
from quire.messages.pooling_params import PoolingParams
from support.minilm import minilm
from support.server import Host, Service, eventually

TEXTS = ["Why is the sky blue?", "Trees grow."]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(model=str(minilm()))
    yield host
    host.close()


@pytest.fixture(scope="module")
def embedder(host: Host) -> Service:
    return host.serve(served_model_name=["all-minilm"])


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(str(minilm()))


def embed(service: Service, text: str | list[str], **fields):
    answer = service.post("/api/embed", {"model": "all-minilm", "input": text, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def test_embeddings_are_those_of_python(embedder, offline, host: Host):
    outputs = offline.embed(TEXTS, use_tqdm=False)
    expected = np.array([output.outputs.embedding for output in outputs])
    answer = embed(embedder, TEXTS, keep_alive="5m", options={"num_ctx": 256})
    np.testing.assert_allclose(answer["embeddings"], expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(answer["embeddings"], axis=1), 1, atol=1e-6)
    assert answer["model"] == "all-minilm"
    assert answer["prompt_eval_count"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert answer["total_duration"] > answer["load_duration"] == 0
    one = embed(embedder, TEXTS[0])
    np.testing.assert_allclose(one["embeddings"], expected[:1], atol=1e-6)
    assert embed(embedder, "")["embeddings"] == embed(embedder, [])["embeddings"] == []
    assert embed(embedder, [])["prompt_eval_count"] == 0
    eventually(lambda: host.is_idle)


def test_the_older_endpoint_gives_the_model_s_own_length(embedder, offline):
    [output] = offline.embed(TEXTS[0], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    answer = embedder.post("/api/embeddings", {"model": "all-minilm:latest", "prompt": TEXTS[0]}).json
    assert answer.keys() == {"embedding"}
    np.testing.assert_allclose(answer["embedding"], output.outputs.embedding, atol=1e-5)
    assert embedder.post("/api/embeddings", {"model": "all-minilm"}).json == {"embedding": []}


def test_embeddings_can_be_shortened(embedder):
    whole = np.array(embed(embedder, TEXTS)["embeddings"])
    short = np.array(embed(embedder, TEXTS, dimensions=8)["embeddings"])
    np.testing.assert_allclose(short, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-6)


def test_a_text_that_is_too_long_is_cut_off_unless_truncate_is_false(embedder, host: Host):
    long = "tree " * 2000
    answer = embed(embedder, long)
    assert answer["prompt_eval_count"] == host.llm.max_model_len
    assert answer["embeddings"] == embed(embedder, long, truncate=True)["embeddings"]
    refused = embedder.post("/api/embed", {"model": "all-minilm", "input": long, "truncate": False})
    assert refused.status == 400
    assert f"max_model_len is {host.llm.max_model_len}" in refused.json["error"]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/api/embed", {}, "input"),
        ("/api/embed", {"input": 5}, "input"),
        ("/api/embed", {"input": ["a", 5]}, "input[1]"),
        ("/api/embed", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/api/embed", {"input": "a", "dimensions": 10_000}, "dimensions"),
        ("/api/embed", {"input": "a", "truncate": "maybe"}, "truncate"),
        ("/api/embed", {"input": "a", "keep_alive": "x"}, "keep_alive"),
        ("/api/embeddings", {"prompt": 5}, "prompt"),
    ],
)
def test_a_wrong_field_is_named(embedder, path, fields, name):
    answer = embedder.post(path, fields)
    assert answer.status == 400
    assert answer.json.keys() == {"error"}
    assert name in answer.json["error"]


def test_the_model_is_one_for_embeddings(embedder):
    shown = embedder.post("/api/show", {"model": "all-minilm"}).json
    assert shown["capabilities"] == ["embedding"]
    assert (shown["details"]["family"], shown["details"]["parameter_size"]) == ("bert", "22.57M")
    answer = embedder.post("/api/generate", {"model": "all-minilm", "prompt": "a"})
    assert (answer.status, "generates no text" in answer.json["error"]) == (400, True)
