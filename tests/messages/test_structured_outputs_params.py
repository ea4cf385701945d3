"""StructuredOutputsParams: what is a valid constraint, before any grammar is compiled."""

import msgspec
import pytest

from quire import SamplingParams, StructuredOutputsParams


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "none are specified"),
        ({"json_object": False}, "none are specified"),
        ({"json": "{}", "regex": "a"}, "multiple are specified"),
        ({"regex": 5}, "regex must contain text, got int"),
        ({"regex": "\ud800"}, "regex is not valid Unicode"),
        ({"choice": []}, "choice must be a list of one or more strings"),
        ({"choice": "ab"}, "choice must be a list of one or more strings"),
        ({"choice": ["a", 1]}, "choice must contain text, got int"),
        ({"choice": ["a\udfff"]}, "choice is not valid Unicode"),
        ({"json": "{"}, "json is not a JSON schema"),
        ({"json": "[]"}, "json must be a JSON schema, an object, got list"),
        ({"json": 3}, "json must be a JSON schema, an object, got int"),
        ({"json": {"const": float("nan")}}, "json is not a JSON schema: Out of range float"),
        ({"json": {"const": object()}}, "json is not a JSON schema"),
        ({"json": '"' + "[" * 100_000}, "json is not a JSON schema"),
        ({"json_object": "yes"}, "json_object must be True or False"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
    ],
)
def test_wrong_constraints_are_refused(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        StructuredOutputsParams(**fields)
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(structured_outputs=fields)


def test_schemas_nested_without_end_are_refused():
    schema: dict = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        StructuredOutputsParams(json=schema)


def test_a_schema_may_be_a_dict_or_text_or_a_boolean():
    assert StructuredOutputsParams(json={"type": "object"}) == StructuredOutputsParams(json='{"type": "object"}')
    assert StructuredOutputsParams(json="true").json == "true"


def test_constraints_survive_the_way_to_the_core():
    params = SamplingParams(structured_outputs={"json": {"const": 2**70}, "disable_any_whitespace": True})
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert sent.structured_outputs == params.structured_outputs
