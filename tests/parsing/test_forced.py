"""The calls that tool_choice demands."""

import json

import jsonschema
import pytest

from quire.parsing.forced import forced_calls, forced_calls_schema
from support.answers import DEFINITIONS, NOW, PARIS
from support.parsing import parse, parts_of

_NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_required_calls_are_told_in_any_split():
    text = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name":"now","parameters":{}}]'
    jsonschema.validate(json.loads(text), forced_calls_schema(DEFINITIONS, "required"))
    for cuts in ([], range(len(text)), *([cut] for cut in range(len(text)))):
        parsed = parse(lambda: forced_calls("required"), parts_of(text, cuts))
        assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == [PARIS, NOW]
        assert parsed.content == ""


def test_arguments_of_a_named_function_are_the_whole_answer():
    parsed = parse(lambda: forced_calls(_NAMED), [' {"ci', 'ty": "Paris"}'])
    assert parsed.calls == [("get_weather", '{"city": "Paris"}')]
    assert forced_calls_schema(DEFINITIONS, _NAMED) == DEFINITIONS[0]["function"]["parameters"]


def test_arguments_are_told_as_they_arrive():
    parser = forced_calls("required")
    told = [parser.feed(part) for part in ('[{"name": "f"', ', "parameters": {"a"', ": 1", "}}]")]
    assert [[getattr(event, "text", "call") for event in events] for events in told] == [
        [],
        ["call", '{"a"'],
        [": 1"],
        ["}"],
    ]


def test_the_schema_allows_one_call_if_calls_are_not_parallel():
    schema = forced_calls_schema(DEFINITIONS, "required", parallel=False)
    call = {"name": "now", "parameters": {}}
    jsonschema.validate([call], schema)
    for wrong in ([], [call, call], [{"name": "other", "parameters": {}}], [{"name": "now"}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_references_in_the_parameters_of_several_tools_stay_apart():
    def tool(name: str, kind: str) -> dict:
        definitions = {"part": {"type": kind}}
        properties = {"part": {"$ref": "#/$defs/part"}, "again": {"$ref": "#"}}
        return {"function": {"name": name, "parameters": {"$defs": definitions, "properties": properties}}}

    schema = forced_calls_schema([tool("a/b", "string"), tool("c~", "integer")], "required")
    jsonschema.validate([{"name": "a/b", "parameters": {"part": "x", "again": {"part": "y"}}}], schema)
    jsonschema.validate([{"name": "c~", "parameters": {"part": 1, "again": {"part": 2}}}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "c~", "parameters": {"again": {"part": "y"}}}], schema)


def test_a_function_that_is_not_among_the_tools_is_an_error():
    with pytest.raises(ValueError, match=r"'fly'.*not in tools"):
        forced_calls_schema(DEFINITIONS, {"type": "function", "function": {"name": "fly"}})
