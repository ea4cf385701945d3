"""Values of arguments as JSON text."""

import json

import pytest

from quire_parsing.values import from_python, parameter_types, typed


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("Paris", {"type": "string"}, "Paris"),
        ("3", {"type": "string"}, "3"),
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "number"}, 3),
        (" 3.5\n", {"type": "number"}, 3.5),
        ("3.5", {"type": "integer"}, "3.5"),
        ("many", {"type": "integer"}, "many"),
        ("True", {"type": "boolean"}, True),
        ("FALSE", {"type": "boolean"}, False),
        ("null", {"type": "integer"}, None),
        ("None", {"type": ["object", "null"]}, None),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': (1, None)}", {"properties": {}}, {"a": [1, None]}),
        ("[1, 2]", {"items": {}}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 10_000, {"type": "array"}, "[" * 10_000),
        ("9" * 10_000, {"type": "integer"}, "9" * 10_000),
        ("x", {}, "x"),
        ("[1]", True, [1]),
        ("7", {"type": [{}, 3]}, 7),
        ("7", {"type": 5}, 7),
        ("7", {"type": None}, 7),
        ("7", {"type": {"a": 1}, "enum": 5}, 7),
    ],
)
def test_a_value_has_the_type_that_its_schema_allows(text: str, schema: object, value: object):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    assert json.loads(typed(text, parameter_types([tool])["f"]["a"])) == value


@pytest.mark.parametrize("parameters", [None, {}, {"properties": None}, {"properties": []}])
def test_tools_without_parameters_have_no_types(parameters: object):
    assert parameter_types([{"function": {"name": "f", "parameters": parameters}}]) == {"f": {}}


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it\\'s'", "it's"),
        (r'"a\n\t\\ \x41 \u00e9 \d"', "a\n\t\\ A é \\d"),
        (r"'\ud83d\ude00 \ud83d'", "😀 �"),
        ("(1, 'a', [True, None,],)", [1, "a", [True, None]]),
        ("{'a': {}, \"b\": -1.5e3}", {"a": {}, "b": -1500.0}),
        ("'None, True, (x)'", "None, True, (x)"),
        ("f(1)", "f(1)"),
        ("{1: 2}", "{1: 2}"),
        ("'open", "'open"),
        ("1 +", "1 +"),
    ],
)
def test_python_literals_become_json(literal: str, value: object):
    assert json.loads(from_python(literal)) == value
