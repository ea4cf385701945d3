"""`quire route --rules`: real embeddings, and servers that record what reaches them."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from support.minilm import minilm
from support.route import Proxy, SimulatedGpu, stand_ins
from support.waiting import eventually

RULES = """
default_model = "small"

[embedding]
model = "{model}"

[[classifier]]
name = "reasoning"
file = "reasoning"

[cache]
enabled = true
similarity = 0.9

[[rule]]
name = "guard"
when = {{ keywords = ["how to build a bomb", "launder money"] }}
then = {{ refuse = "This server does not answer that." }}

[[rule]]
name = "team"
when = {{ api_keys_sha256 = ["{key}"], tools = true }}
then = {{ model = "large", cache_salt = "team" }}

[[rule]]
name = "french"
when = {{ languages = ["fr"], max_chars = 1000 }}
then = {{ model = "small", system_prompt = "Réponds en français.", tag = "fr" }}

[[rule]]
name = "recipes"
when = {{ similar_to = ["How do I cook noodles?", "Give me a recipe for a cake."], similarity = 0.45 }}
then = {{ model = "small", sampling = {{ temperature = 0.9 }} }}

[[rule]]
name = "think"
when = {{ classifier = "reasoning", labels = ["reason"], probability = 0.7 }}
then = {{ model = "large", reasoning = true }}
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[SimulatedGpu]]:
    with stand_ins(2) as servers:
        servers[0].models, servers[1].models = ("small",), ("large",)
        yield servers


@pytest.fixture(scope="module")
def proxy(servers: list[SimulatedGpu], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    pytest.importorskip("py3langid")
    path: Path = tmp_path_factory.mktemp("rules") / "rules.toml"
    path.write_text(RULES.format(model=minilm(), key=sha256(b"team-key").hexdigest()))
    options = ("--rules", str(path), "--api-key", "key", "team-key")
    with Proxy(*(server.url for server in servers), options=options) as proxy:
        proxy.wait_for_backends(2)
        yield proxy


@pytest.fixture(autouse=True)
def _forget(servers: list[SimulatedGpu]) -> Iterator[None]:
    yield
    for server in servers:
        server.received.clear()
        server.reply = lambda handler: handler.send(handler.server.url.encode())


def ask(proxy: Proxy, text: str, key: str = "key", **fields: Any) -> Any:
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], **fields}
    return proxy.post("/v1/chat/completions", body, Authorization=f"Bearer {key}")


def arrived(server: SimulatedGpu) -> Any:
    (request,) = server.received
    return json.loads(request.body)


def test_a_hard_question_goes_to_the_model_that_thinks(proxy: Proxy, servers: list[SimulatedGpu]):
    answer = ask(proxy, "Prove that the square root of 2 is irrational, and explain each step.")
    assert answer.status == 200
    assert not servers[0].received
    body = arrived(servers[1])
    assert body["model"] == "large"
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    explained = answer.headers["x-quire-route"]
    assert explained.startswith("rule=think; model=large; label=reason; probability=0.")
    assert "; ms=" in explained
    eventually(lambda: proxy.counted("decisions_total", rule="think", model="large") == 1)


def test_a_simple_question_goes_to_the_default(proxy: Proxy, servers: list[SimulatedGpu]):
    answer = ask(proxy, "Hello, nice to meet you!")
    assert answer.headers["x-quire-route"].startswith("rule=default; model=small; ms=")
    assert arrived(servers[0])["model"] == "small"


def test_similar_texts_in_another_language_and_tools(proxy: Proxy, servers: list[SimulatedGpu]):
    answer = ask(proxy, "What is a good way to cook spaghetti?", temperature=None)
    assert "rule=recipes; model=small; similarity=0." in answer.headers["x-quire-route"]
    assert arrived(servers[0])["temperature"] == 0.9
    servers[0].received.clear()

    answer = ask(proxy, "Bonjour, pouvez-vous me dire où se trouve la bibliothèque de la ville ?")
    assert "rule=french; model=small; tag=fr; language=fr" in answer.headers["x-quire-route"]
    assert arrived(servers[0])["messages"][0] == {"role": "system", "content": "Réponds en français."}

    tools = [{"type": "function", "function": {"name": "f"}}]
    assert "rule=team" in ask(proxy, "Hello there", "team-key", tools=tools).headers["x-quire-route"]
    assert arrived(servers[1])["cache_salt"] == "team"


def test_a_guard_refuses(proxy: Proxy, servers: list[SimulatedGpu]):
    answer = ask(proxy, "Please tell me How To Build A Bomb.")
    assert answer.status == 400
    assert answer.json["error"]["message"] == "This server does not answer that."
    assert answer.json["error"]["code"] == "content_filter"
    assert "rule=guard" in answer.headers["x-quire-route"]
    assert not servers[0].received
    assert not servers[1].received


def test_a_similar_request_is_answered_from_the_cache(proxy: Proxy, servers: list[SimulatedGpu]):
    first = ask(proxy, "What is the capital of Portugal?", seed=7)
    assert "cache" not in first.headers["x-quire-route"]
    again = ask(proxy, "What's the capital of Portugal?", seed=7)
    assert again.body == first.body
    assert "; cache=0.9" in again.headers["x-quire-route"]
    assert len(servers[0].received) == 1
    for other in ("What is the capital of Norway?", "What is the capital of Portugal"):
        seed = 7 if "Norway" in other else 8
        assert "cache" not in ask(proxy, other, seed=seed).headers["x-quire-route"]
    ask(proxy, "What is the capital of Portugal?", "team-key", seed=7)
    assert len(servers[0].received) == 4


def test_failed_and_broken_answers_are_not_stored(proxy: Proxy, servers: list[SimulatedGpu]):
    servers[0].reply = lambda handler: handler.send(b"{}", 400)
    assert ask(proxy, "Who painted the Mona Lisa?").status == 400
    servers[0].reply = lambda handler: (handler.begin_chunks(), handler.send_chunk(b"half"), handler.cut())
    with contextlib.suppress(http.client.IncompleteRead):
        ask(proxy, "Who painted the Mona Lisa?")
    servers[0].reply = lambda handler: (handler.begin_chunks(), handler.send_chunk(b"all"), handler.send_chunk(b""))
    assert ask(proxy, "Who painted the Mona Lisa?").body == b"all"
    assert ask(proxy, "Who painted the Mona Lisa?").body == b"all"
    assert len(servers[0].received) == 3


def test_other_models_are_found_by_name(proxy: Proxy, servers: list[SimulatedGpu]):
    for number, name in enumerate(("small", "large")):
        answer = ask(proxy, "Hello", model=name)
        assert "x-quire-route" not in answer.headers
        assert arrived(servers[number])["model"] == name
    answer = ask(proxy, "Hello", model="unknown")
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    names = [entry["id"] for entry in proxy.request("GET", "/v1/models").json["data"]]
    assert sorted(names) == ["auto", "large", "small"]
