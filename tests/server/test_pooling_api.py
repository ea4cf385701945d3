"""Embeddings, scores and rankings over HTTP, with a real model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM
from quire.server.vectors import raw
from support.minilm import minilm
from support.server import Host, Service, eventually


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(model=str(minilm()))
    yield host
    host.close()


@pytest.fixture(scope="module")
def server(host: Host) -> Service:
    return host.serve()


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(str(minilm()))


def post(server: Service, path: str, body: dict[str, Any]) -> Any:
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    return answer.json


def embed(server: Service, **body: Any) -> np.ndarray:
    return np.array([item["embedding"] for item in post(server, "/v1/embeddings", body)["data"]])


def test_embeddings_are_those_of_python_in_any_form_of_input(server, offline):
    texts = ["hello", "A longer sentence about trees.", "hello"]
    wanted = np.array([output.outputs.embedding for output in offline.embed(texts, use_tqdm=False)])
    np.testing.assert_array_equal(embed(server, input=texts), wanted)
    np.testing.assert_array_equal(embed(server, input="hello"), wanted[:1])
    ids = offline.embed("hello", use_tqdm=False)[0].prompt_token_ids
    np.testing.assert_array_equal(embed(server, input=ids), wanted[:1])
    np.testing.assert_array_equal(embed(server, input=[ids, ids]), wanted[[0, 0]])
    answer = post(server, "/v1/embeddings", {"input": texts, "encoding_format": "base64"})
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]]
    np.testing.assert_array_equal(np.array(decoded), wanted.astype(np.float32))


def test_an_answer_has_openais_keys(server):
    answer = post(server, "/v1/embeddings", {"input": ["a", "b"], "dimensions": 5})
    assert answer["object"] == "list"
    assert answer["id"].startswith("embd-")
    assert [(item["object"], item["index"], len(item["embedding"])) for item in answer["data"]] == [
        ("embedding", 0, 5),
        ("embedding", 1, 5),
    ]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": 0}


@pytest.mark.slow
def test_a_batch_of_a_thousand(server):
    vectors = embed(server, input=[f"text number {i % 50}" for i in range(1000)], dimensions=8)
    assert vectors.shape == (1000, 8)
    np.testing.assert_array_equal(vectors[:50], vectors[950:])


def test_long_inputs_are_refused_or_truncated(server):
    answer = server.post("/v1/embeddings", {"input": ["a", "dog " * 400]})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "input", "context_length_exceeded")
    assert "402 tokens, but max_model_len is 256" in answer.error["message"]
    cut = post(server, "/v1/embeddings", {"input": "dog " * 400, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 256
    cut = post(server, "/v1/embeddings", {"input": "dog " * 400, "truncate_prompt_tokens": 10})
    np.testing.assert_array_equal(cut["data"][0]["embedding"], embed(server, input="dog " * 8)[0])


def test_scores_and_rankings_are_cosines(server):
    query, documents = "a cat", ["tax law", "a kitten", {"text": "a dog"}]
    vectors = embed(server, input=[query, "tax law", "a kitten", "a dog"])
    cosines = vectors[1:] @ vectors[0]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = post(server, path, {"query": query, "documents": documents, "top_n": 2})
        assert [result["index"] for result in answer["results"]] == [1, 2]
        assert answer["results"][0]["document"] == {"text": "a kitten"}
        assert [r["relevance_score"] for r in answer["results"]] == pytest.approx(cosines[[1, 2]], abs=1e-5)
    for path in ("/v1/score", "/score"):
        answer = post(server, path, {"text_1": query, "text_2": ["tax law", "a kitten"]})
        assert [item["score"] for item in answer["data"]] == pytest.approx(cosines[:2], abs=1e-5)
    pairs = post(server, "/score", {"queries": ["tax law", "a kitten"], "documents": ["tax law", "a kitten"]})
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1, 1], abs=1e-5)


def test_pooling_gives_vectors_of_tokens(server):
    answer = post(server, "/pooling", {"input": [[101, 7592, 102]], "task": "token_embed"})
    assert np.array(answer["data"][0]["data"]).shape == (3, 384)


def test_coheres_shape(server):
    answer = post(server, "/v2/embed", {"texts": ["a", "b"], "input_type": "search_query", "output_dimension": 4})
    assert np.array(answer["embeddings"]["float"]).shape == (2, 4)


DTYPES = {
    "float32": (torch.float32, torch.int32),
    "float16": (torch.float16, torch.int16),
    "bfloat16": (torch.bfloat16, torch.int16),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}


def bytes_of(values: np.ndarray, dtype: str, endianness: str) -> bytes:
    kind, whole = DTYPES[dtype]
    numbers = torch.from_numpy(np.asarray(values, np.float32)).to(kind).view(whole).numpy()
    return (numbers.byteswap() if endianness == "big" else numbers).tobytes()


@pytest.mark.parametrize("endianness", ["native", "little", "big"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_bytes_of_any_type_and_order(server, dtype, endianness):
    asked = {"input": ["a", "b"], "embed_dtype": dtype, "endianness": endianness}
    wanted = [bytes_of(vector, dtype, endianness) for vector in embed(server, input=["a", "b"])]
    answer = post(server, "/v1/embeddings", {**asked, "encoding_format": "base64"})
    assert [base64.b64decode(item["embedding"]) for item in answer["data"]] == wanted
    for path in ("/v1/embeddings", "/pooling"):
        answer = server.post(path, {**asked, "encoding_format": "bytes"})
        about = json.loads(answer.headers["metadata"])
        assert answer.headers["content-type"] == "application/octet-stream"
        assert [answer.body[item["start"] : item["end"]] for item in about["data"]] == wanted
        assert {(item["embed_dtype"], item["endianness"], *item["shape"]) for item in about["data"]} == {
            (dtype, endianness, 384)
        }
        assert about["usage"]["prompt_tokens"] == 6
        only = server.post(path, {**asked, "encoding_format": "bytes_only"})
        assert only.body == b"".join(wanted)
        assert "metadata" not in only.headers


def test_rounding_is_that_of_torch():
    rng = np.random.default_rng(0)
    edges = [0, -0.0, 448, 464, 465, -1000, 57344, 61439, 61440, 65519, 65520, 1e6]
    values = np.concatenate([rng.normal(size=5000) * scale for scale in (1e-3, 1, 300)] + [edges]).astype(np.float32)
    for dtype in DTYPES:
        assert raw(values, dtype, "little") == bytes_of(values, dtype, "little"), dtype


def test_texts_are_shortened_on_the_side_that_a_request_names(server):
    text = "dog " * 300 + "cat " * 300
    left, right = ("cat " * 8).strip(), ("dog " * 8).strip()
    cut = {"input": text, "truncate_prompt_tokens": 10}
    np.testing.assert_array_equal(embed(server, **cut, truncation_side="left"), embed(server, input=left))
    for side in ("right", None):
        np.testing.assert_array_equal(embed(server, **cut, truncation_side=side), embed(server, input=right))
    answer = post(server, "/v2/embed", {"texts": [text], "truncate": "START", "max_tokens": 10})
    np.testing.assert_allclose(answer["embeddings"]["float"], embed(server, input=left), rtol=1e-6)
    short = server.post("/v2/embed", {"texts": ["a", "a b c d"], "truncate": "NONE", "max_tokens": 5})
    assert (short.status, short.error["param"]) == (400, "max_tokens")
    assert post(server, "/v1/embeddings", {"input": "a", "padding": "do_not_pad"})


def test_signs_are_packed_as_coheres(server):
    kinds = ["float", "binary", "ubinary", "base64"]
    found = post(server, "/v2/embed", {"texts": ["a", "b"], "embedding_types": kinds})["embeddings"]
    signs = np.packbits(np.array(found["float"]) >= 0, axis=-1).astype(int)
    assert found["ubinary"] == signs.tolist()
    assert found["binary"] == (signs - 128).tolist()
    assert [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in found["base64"]] == found["float"]


def test_inputs_in_parts_are_texts(server):
    inputs = [{"content": [{"type": "text", "text": "a cat"}, {"type": "text", "text": " sits"}]}]
    whole = post(server, "/v2/embed", {"texts": ["a cat sits"]})
    assert post(server, "/v2/embed", {"inputs": inputs})["embeddings"] == whole["embeddings"]


def test_texts_of_a_score_are_shortened_one_by_one(server):
    query, document = "a cat " * 20, "tax law " * 20
    cut = {"query": query, "documents": [document], "max_tokens_per_query": 2, "max_tokens_per_doc": 4}
    [result] = post(server, "/rerank", cut)["results"]
    [same] = post(server, "/rerank", {"query": "a cat", "documents": ["tax law tax law"]})["results"]
    assert result["relevance_score"] == same["relevance_score"]
    scored = {"text_1": query, "text_2": document, "max_tokens_per_query": 2, "max_tokens_per_doc": 4}
    assert post(server, "/score", scored)["data"][0]["score"] == same["relevance_score"]
    whole = {"query": query, "documents": [document], "max_tokens_per_query": 0}
    assert post(server, "/rerank", whole)["results"][0]["relevance_score"] != same["relevance_score"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input"),
        ("/v1/embeddings", {"input": [40_000]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 1000}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": "a", "priority": 3}, "priority"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model"),
        ("/v1/embeddings", {"input": ["a"] * 20_000}, "input"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/pooling", {"input": "a", "task": "sing"}, "task"),
        ("/classify", {"input": "a"}, "model"),
        ("/score", {"text_1": ["a", "b", "c"], "text_2": ["d", "e"]}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/rerank", {"documents": ["b"]}, "query"),
        ("/v2/embed", {"texts": []}, "texts"),
        ("/v2/embed", {}, "texts"),
        ("/v2/embed", {"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
        (
            "/v2/embed",
            {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "inputs[0].content[0].type",
        ),
        ("/v2/embed", {"texts": ["a"], "images": ["x"]}, "images"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 12}, "embedding_types"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "int8"}, "embed_dtype"),
        ("/v1/embeddings", {"input": "a", "endianness": "middle"}, "endianness"),
        ("/v1/embeddings", {"input": "a", "padding": "max_length"}, "padding"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ("/v1/embeddings", {"input": "a", "late_chunking": True}, "late_chunking"),
        ("/pooling", {"input": "a", "late_chunking_params": {"chunk_size": 3}}, "late_chunking_params"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "Find."}, "instruction"),
        ("/score", {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model"),
    ],
)
def test_wrong_requests_are_errors_that_name_the_field(server, host, path, body, param):
    answer = server.post(path, body)
    assert answer.status in (400, 404)
    assert answer.error["param"] == param
    assert host.is_idle


def test_a_client_that_goes_away_leaves_nothing(server, host):
    with server.connection("/v1/embeddings", {"input": ["word " * 200] * 500}) as raw:
        eventually(lambda: not host.is_idle)
        raw.close()
    eventually(lambda: host.is_idle)
    assert json.loads(server.get("/load").body) == {"server_load": 0}


def test_the_log_has_tokens_of_requests_and_none_of_their_text(server, caplog):
    caplog.set_level("INFO", "quire")
    text = "The shibboleth of the old house"
    bodies = {
        "/v1/embeddings": {"input": [text, text]},
        "/pooling": {"input": text},
        "/classify": {"input": text},
        "/v1/score": {"text_1": text, "text_2": [text]},
        "/v1/rerank": {"query": text, "documents": [text]},
        "/v2/embed": {"texts": [text]},
    }
    for path, body in bodies.items():
        for field in body:
            for value in (body[field], {"text": text}, [[text]], 5):
                server.post(path, {**body, field: value})
    answer = server.post("/v1/embeddings", {"input": text})
    said = f"request {answer.headers['x-request-id']}: {answer.json['usage']['prompt_tokens']} prompt tokens (0 cached)"
    eventually(lambda: said in caplog.text)
    of_requests = [record.getMessage() for record in caplog.records if record.module == "request_log"]
    assert not [line for line in of_requests if "generated" in line]
    assert "shibboleth" not in caplog.text
