"""A server with several models and rules that choose one by what a request says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.many_models import ONE, ManyModels, declare
from support.minilm import minilm

RULES = """
default_model = "first"

[embedding]
model = "{model}"

[cache]
enabled = true
similarity = 0.9

[[rule]]
name = "guard"
when = {{ keywords = ["password"] }}
then = {{ refuse = "Ask somebody else." }}

[[rule]]
name = "stories"
when = {{ similar_to = ["Tell me a fairy tale.", "Write a story about a dragon."], similarity = 0.4 }}
then = {{ model = "second", sampling = {{ max_tokens = 3 }} }}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyModels]:
    path = tmp_path_factory.mktemp("rules") / "rules.toml"
    path.write_text(RULES.format(model=minilm()))
    with ManyModels([declare("first"), declare("second")], memory=4 * ONE, rules=str(path)) as server:
        yield server


def ask(models: ManyModels, text: str, **fields: Any) -> Any:
    body = {"model": "auto", "prompt": text, "max_tokens": 5, "temperature": 0, **fields}
    return models.post("/v1/completions", body)


def test_the_rules_choose_the_model_and_load_it(models: ManyModels):
    answer = ask(models, "Invent a tale with a dragon and a knight", max_tokens=None)
    assert answer.headers["x-quire-route"].startswith("rule=stories; model=second; similarity=0.")
    assert (answer.json["model"], answer.json["usage"]["completion_tokens"]) == ("second", 3)
    assert models.states == {"first": "unloaded", "second": "loaded"}
    answer = ask(models, "2 + 2 =")
    assert answer.headers["x-quire-route"].startswith("rule=default; model=first; ms=")
    assert answer.json["model"] == "first"
    names = [entry["id"] for entry in models.get("/v1/models").json["data"]]
    assert names == ["first", "second", "auto"]


def test_requests_with_a_name_are_left_alone(models: ManyModels):
    answer = ask(models, "Tell me a story about a dragon", model="first")
    assert answer.json["model"] == "first"
    assert "x-quire-route" not in answer.headers


def test_a_rule_refuses(models: ManyModels):
    answer = ask(models, "What is the PASSWORD?")
    assert (answer.status, answer.error["code"]) == (400, "content_filter")
    assert answer.error["message"] == "Ask somebody else."
    assert answer.headers["x-quire-route"].startswith("rule=guard")


def test_streams_come_from_the_cache_as_they_were(models: ManyModels):
    first = ask(models, "The weather in Lisbon is", stream=True)
    again = ask(models, "The weather in Lisbon is", stream=True)
    assert first.body.endswith(b"data: [DONE]\n\n")
    assert again.body == first.body
    assert again.headers["content-type"] == first.headers["content-type"]
    assert "; cache=1.000" in again.headers["x-quire-route"]
