"""Schemas in the keywords that grammars are made from."""

import json
import random

import jsonschema
import pytest

from quire.structured.open_values import narrowed
from quire.structured.schema import rewritten

DOCUMENTS = [
    None, True, False, 0, 1, -1, 2.5, 7, 100, "", "a", "abc", "longer text", [], [1], [1, 2], ["a", 1], [1, 2, 3, 4],
    [[], {}], {}, {"a": 1}, {"a": "x"}, {"b": 2}, {"a": 1, "b": 2}, {"a": "x", "b": "y"}, {"foo": 1}, {"c": {"a": 1}},
    {"a": 1, "b": 2, "c": 3}, {"kind": "cat"}, {"kind": "dog", "a": 1},
]  # fmt: skip

SCHEMAS = {
    "not a type": {"not": {"type": ["integer", "string"]}},
    "not required": {"type": "object", "not": {"required": ["a"]}},
    "not a value": {"not": {"enum": ["a", 1, None, [1], {"a": 1}]}},
    "not a property": {"type": "object", "required": ["a"], "not": {"properties": {"a": {"type": "integer"}}}},
    "not any": {"not": {"anyOf": [{"type": "object"}, {"type": "string", "maxLength": 2}]}},
    "not all": {"not": {"allOf": [{"type": "string"}, {"minLength": 2}]}},
    "not not": {"not": {"not": {"type": "array"}}},
    "if then else": {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "object"}},
    "if only": {"type": ["string", "null"], "if": {"type": "string"}, "then": {"maxLength": 1}},
    "one of": {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    "one of objects": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
    "one of kinds": {"oneOf": [
        {"type": "object", "required": ["kind"], "properties": {"kind": {"const": "cat"}}},
        {"type": "object", "required": ["kind", "a"], "properties": {"kind": {"enum": ["dog", "fox"]}}}]},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "contains many": {"type": "array", "contains": {"type": "integer"}, "minContains": 2, "maxContains": 3},
    "contains none": {"contains": {"type": "integer"}, "minContains": 0},
    "dependent required": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependent schemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b", "c"]}}},
    "names by pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    "names by length": {"type": "object", "propertyNames": {"maxLength": 1}, "properties": {"kind": True}},
    "names by value": {"type": "object", "propertyNames": {"enum": ["a", "c"]}, "required": ["a"]},
    "unevaluated beside properties": {
        "type": "object", "allOf": [{"properties": {"a": True}}], "properties": {"b": True},
        "unevaluatedProperties": False},
    "unevaluated beside branches": {
        "type": "object", "unevaluatedProperties": False,
        "anyOf": [{"required": ["a"], "properties": {"a": {"type": "integer"}}}, {"properties": {"b": True}}]},
    "unevaluated behind a reference": {
        "$ref": "#/$defs/base", "properties": {"b": True}, "unevaluatedProperties": {"type": "integer"},
        "$defs": {"base": {"type": "object", "properties": {"a": {"type": "string"}}}}},
    "unevaluated items": {
        "type": "array", "allOf": [{"prefixItems": [{"type": "string"}]}], "prefixItems": [True],
        "unevaluatedItems": {"type": "integer"}},
    "recursive": {"type": "object", "properties": {"c": {"$ref": "#"}, "a": True}, "additionalProperties": False},
    "anchors": {"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": "integer"}}},
    "dynamic references": {
        "$id": "http://t/strings", "$ref": "list",
        "$defs": {
            "item": {"$dynamicAnchor": "T", "type": "string"},
            "list": {"$id": "list", "type": "array", "items": {"$dynamicRef": "#T"},
                     "$defs": {"default": {"$dynamicAnchor": "T"}}}}},
    "numbers of items that are floats": {"type": "array", "minItems": 1.0, "maxItems": 2.0},
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_rewritten_schema_allows_only_valid_documents_and_some(name):
    schema = SCHEMAS[name]
    before, after = (jsonschema.Draft202012Validator(s) for s in (schema, rewritten(schema)))
    allowed = [document for document in DOCUMENTS if after.is_valid(document)]
    assert allowed
    assert [document for document in allowed if not before.is_valid(document)] == []


def random_schema(chance: random.Random, depth: int = 0) -> dict | bool:
    """A schema of keywords that depend on each other."""
    if depth > 3 or chance.random() < 0.1:
        return chance.choice([True, False, {"type": chance.choice(["string", "integer", "object", "array", "null"])}])

    def sub() -> dict | bool:
        return random_schema(chance, depth + 1)

    name = chance.choice("abc")
    keywords = {
        "type": lambda: chance.choice(["object", "array", ["string", "integer"], "number"]),
        "properties": lambda: {letter: sub() for letter in chance.sample("abc", 2)},
        "required": lambda: [name],
        "additionalProperties": sub,
        "items": sub,
        "not": sub,
        "if": sub,
        "then": sub,
        "else": sub,
        "contains": sub,
        "prefixItems": lambda: [sub()],
        "minimum": lambda: chance.randint(-1, 3),
        "maxLength": lambda: chance.randint(0, 3),
        "minItems": lambda: chance.randint(0, 2),
        "maxProperties": lambda: chance.randint(0, 2),
        "const": lambda: chance.choice(DOCUMENTS),
        "enum": lambda: chance.sample(DOCUMENTS, 3),
        "allOf": lambda: [sub(), sub()],
        "anyOf": lambda: [sub(), sub()],
        "oneOf": lambda: [sub(), sub()],
        "dependentRequired": lambda: {name: [chance.choice("abc")]},
        "dependentSchemas": lambda: {name: sub()},
        "unevaluatedProperties": sub,
        "unevaluatedItems": sub,
        "propertyNames": lambda: {"maxLength": 1},
        "maxContains": lambda: chance.randint(0, 2),
        "minContains": lambda: chance.randint(0, 2),
    }
    return {keyword: keywords[keyword]() for keyword in chance.sample(list(keywords), chance.randint(1, 4))}


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("rewrite", [rewritten, lambda schema: narrowed(rewritten(schema))])
def test_random_schemas_never_allow_more_than_before(rewrite):
    chance, checked = random.Random(5), 0
    for _ in range(500):
        schema = random_schema(chance)
        try:
            after = jsonschema.Draft202012Validator(rewrite(schema))
        except ValueError:
            continue
        before = jsonschema.Draft202012Validator(schema)
        for document in DOCUMENTS:
            if after.is_valid(document):
                checked += 1
                assert before.is_valid(document), (json.dumps(schema), document)
    assert checked > 800


def test_only_known_keywords_are_left():
    known = {"type", "properties", "$defs", "$ref", "items", "required"}
    schema = {
        "title": "A",
        "type": "object",
        "properties": {"title": {"$ref": "#/$defs/b"}},
        "x-ui": 1,
        "$defs": {"b": {"description": "a list", "type": "array", "items": {"default": 3}}},
    }
    assert rewritten(schema).keys() <= known
    assert rewritten(schema)["properties"].keys() == {"title"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"uniqueItems": True}, "uniqueItems is not supported"),
        ({"dependencies": {"a": ["b"]}}, "the keyword 'dependencies' is not supported"),
        ({"type": "string", "nullable": True}, "the keyword 'nullable' is not supported"),
        ({"not": {"pattern": "a"}}, "'not' of 'pattern' is not supported"),
        ({"propertyNames": {"format": "email"}}, "propertyNames with 'format' is not supported"),
        ({"$schema": "http://example.org/my-dialect"}, "the dialect 'http://example.org/my-dialect' is not supported"),
        ({"$ref": "other.json"}, "schemas are not downloaded"),
        ({"properties": {"a": 5}}, "a schema must be an object, true or false, not 5"),
        ({"allOf": {}}, "allOf must be a list"),
        ({"properties": []}, "properties must be an object"),
        ({"not": {}}, "no document is valid"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(schema, message):
    with pytest.raises(ValueError, match=message):
        rewritten(schema)
