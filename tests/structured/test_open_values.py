"""What a JSON schema leaves open is limited, so that texts come to an end."""

import json

import jsonschema
import pytest

from quire import StructuredOutputsParams
from quire.checkpoints.hub import bundled_model
from quire.checkpoints.metadata import load_tokenizer
from quire.structured.guidance import GuidanceBackend
from quire.structured.open_values import narrowed
from quire.structured.vocabulary import Vocabulary

EOS = 2
NAME = {"properties": {"name": {"type": "string"}}}
TREE = {"type": "object", "properties": {"below": {"type": "array", "items": {"$ref": "#"}}}, "required": ["below"]}


@pytest.fixture(scope="module")
def is_allowed():
    """Whether a grammar allows a text as a whole."""
    tokenizer = load_tokenizer(bundled_model())
    backend = GuidanceBackend(Vocabulary(tokenizer, tokenizer.vocab_size, [EOS]))

    def answer(schema: dict | bool, text: str) -> bool:
        matcher = backend.compile(StructuredOutputsParams(json=json.dumps(schema)))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return all(map(matcher.accept, tokens)) and matcher.state.is_accepting()

    return answer


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (NAME, '{"name": "Ada"}', '{"name": "Ada", "age": 36}'),
        ({**NAME, "type": "object"}, "{}", '{"age": 36}'),
        ({**NAME, "additionalProperties": True}, '{"name": "Ada", "age": 36}', '"Ada"'),
        ({**NAME, "minProperties": 2, "required": ["name"]}, '{"name": "Ada", "age": 36}', '{"name": "Ada"}'),
        ({**NAME, "required": ["age"]}, '{"name": "Ada", "age": 36}', '{"name": "Ada"}'),
        ({"allOf": [NAME, {"properties": {"age": {"minimum": 0}}}]}, '{"name": "Ada", "age": 36}', '{"age": "36"}'),
        ({**NAME, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"name": "Ada", "b": 1}', '{"name": "Ada"}'),
        ({"$ref": "#/$defs/name", "$defs": {"name": NAME}}, '{"name": "Ada"}', '{"age": 36}'),
        (TREE, '{"below": [{"below": []}]}', '{"below": [], "above": 1}'),
        ({"patternProperties": {"^x": {"type": "null"}}}, '{"x1": null, "x2": null}', '{"y": null}'),
        ({"prefixItems": [{"type": "string"}]}, '["a"]', '["a", "b"]'),
        ({"prefixItems": [{"type": "string"}], "minItems": 2}, '["a", "b"]', '["a"]'),
        ({"items": {"type": "null"}}, "[" + "null, " * 40 + "null]", "null"),
        ({"minimum": 3}, "3.25", "3." + "3" * 40),
        ({"type": "integer"}, "9" * 18, "9" * 30),
        ({"type": "number"}, "6.02e23", '"6"'),
        ({"type": "string"}, '"' + "a" * 500 + '"', "1"),
        ({"pattern": "^a+$"}, '"aaa"', "1"),
        ({}, '{"a": "b", "c": 1.5}', "1" * 40),
        (True, '["a", null, true]', '[[["a"]]]'),
        ({"type": "object"}, '{"a": {"b": {"c": {"d": [1, 2, 3, 4, 5, 6, 7, 8]}}}}', "1"),
    ],
)
def test_values_are_as_large_as_their_schema_says(is_allowed, schema, allowed, refused):
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(allowed))
    assert is_allowed(schema, allowed)
    assert not is_allowed(schema, refused)


def test_json_objects_have_no_limits(is_allowed):
    assert is_allowed({"type": "object"}, json.dumps({"a": "b" * 500, "c": [{"d": [list(range(20))]}]}))


@pytest.mark.parametrize("schema", [{"contains": False}, {"required": ["a"], "properties": {"a": False}}])
def test_a_schema_that_the_limits_would_make_impossible_is_taken_without_them(is_allowed, schema):
    assert is_allowed(schema, '"text"')


def test_many_combinations_of_branches_get_no_limits():
    choices = [{"anyOf": [{"required": [f"{letter}{index}"]} for letter in "abc"]} for index in range(12)]
    with pytest.raises(ValueError, match="too many combinations"):
        narrowed({"type": "object", "allOf": choices})
