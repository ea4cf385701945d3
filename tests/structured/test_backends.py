"""All back ends of structured outputs: the same kinds of constraints, and valid texts only."""

import json
import random
import re
from importlib.util import find_spec

import jsonschema
import numpy as np
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.checkpoints.hub import bundled_model
from quire.checkpoints.metadata import load_tokenizer
from quire.config.engine import ConfigError
from quire.structured import backends
from quire.structured.backends import check_backend, load_backend
from quire.structured.constraint import Constraint
from quire.structured.vocabulary import Vocabulary

pytestmark = pytest.mark.texts

EOS = 2
PACKAGES = {"guidance": "llguidance", "xgrammar": "xgrammar", "outlines": "outlines_core"}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer"},
        "names": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        "parent": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["kind", "age", "names", "parent"],
    "additionalProperties": False,
}
# Keywords that one of the libraries ignores. A back end refuses them, or all texts are valid.
IGNORED = [
    {"type": "object", "minProperties": 2}, {"type": "string", "pattern": "^a", "maxLength": 2}, {"minimum": 3},
    {"type": "number", "multipleOf": 3}, {"type": "array", "contains": {"type": "integer"}},
    {"allOf": [{"type": "integer"}, {"minimum": 90}]},
    {"type": "object", "patternProperties": {"^a": {"type": "null"}}},
    {"enum": ["ab", 1], "type": "integer"}, {"anyOf": [{"type": "integer"}], "minimum": 5}, {"not": {"type": "string"}},
    {"type": "integer", "minimum": 5, "maximum": 9},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
    {"type": "object", "properties": {"a": {"type": "null"}}}, {"type": "string", "format": "date"},
    {"type": "string", "maxLength": 3}, {"type": "array", "items": {"type": "string", "pattern": "^[^a]{2}$"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(bundled_model())


@pytest.fixture(scope="module", params=PACKAGES)
def backend(request, tokenizer):
    pytest.importorskip(PACKAGES[request.param])
    return load_backend({"backend": request.param}, Vocabulary(tokenizer, tokenizer.vocab_size + 40, [EOS]))


def text_of(backend, tokenizer, params: StructuredOutputsParams, seed: int) -> str | None:
    chance = random.Random(seed)
    constraint, output = Constraint(backend.compile(params), None, [EOS]), []
    while len(output) < 120:
        bits = np.full((1, -(-(tokenizer.vocab_size + 40) // 32)), -1, np.int32)
        backend.fill([constraint.matcher], bits)
        choices = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        choices = [choice for choice in choices if choice < tokenizer.vocab_size + 40]
        token = chance.choice(choices)
        if forced := constraint.forced():
            assert forced[0] in choices
            token = forced[0]
        elif EOS in choices and chance.random() < 0.4:
            token = EOS
        constraint.advance(token)
        assert constraint.error is None
        if token == EOS:
            return tokenizer.decode(output)
        output.append(token)
    return None


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"json": SCHEMA}, jsonschema.Draft202012Validator(SCHEMA).is_valid),
        ({"regex": r"[a-f]{2,5}-[0-9]"}, re.compile(r"[a-f]{2,5}-[0-9]").fullmatch),
        ({"choice": ["yes", "no.*", "é", "yesterday"]}, ["yes", "no.*", "é", "yesterday"].__contains__),
    ],
)
def test_each_back_end_writes_texts_that_match(backend, tokenizer, fields, holds):
    texts = [text_of(backend, tokenizer, StructuredOutputsParams(**fields), seed) for seed in range(8)]
    ended = [json.loads(text) if "json" in fields else text for text in texts if text is not None]
    assert len(ended) >= 2
    assert all(map(holds, ended))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("schema", IGNORED, ids=str)
def test_what_a_back_end_would_ignore_is_refused(backend, tokenizer, schema):
    params = StructuredOutputsParams(json=schema)
    try:
        backend.compile(params)
    except ValueError:
        return
    for seed in range(8):
        text = text_of(backend, tokenizer, params, seed)
        assert text is None or jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text


@pytest.mark.parametrize("name", PACKAGES)
def test_an_engine_uses_the_back_end_that_it_was_told(name):
    pytest.importorskip(PACKAGES[name])
    llm = LLM(max_model_len=256, structured_outputs_config={"backend": name})
    params = SamplingParams(temperature=1, seed=1, max_tokens=150, structured_outputs={"json": SCHEMA})
    outputs = [output.outputs[0] for output in llm.generate(["A pet: "] * 3, params)]
    assert all(
        jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(output.text))
        for output in outputs
        if output.finish_reason == "stop"
    )
    with pytest.raises(ValueError, match="structured_outputs: "):
        llm.generate("A pet: ", SamplingParams(structured_outputs={"regex": "("}))


def test_a_back_end_that_is_not_installed_is_named_at_the_start(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*\[xgrammar\]"):
        check_backend({"backend": "xgrammar"})
    assert find_spec("llguidance") is not None


def test_the_default_back_end_is_needed_only_for_a_grammar(monkeypatch, tokenizer):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    check_backend({})
    check_backend({"backend": "auto"})
    with pytest.raises(ConfigError, match="pip install llguidance"):
        check_backend({"backend": "guidance"})
    with pytest.raises(ConfigError, match="pip install llguidance"):
        load_backend({}, Vocabulary(tokenizer, tokenizer.vocab_size, [EOS]))
