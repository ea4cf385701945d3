"""Values of arguments as JSON text."""

import json

import pytest

from quire.parsing.values import from_python, parameter_types, typed, with_quotes_escaped


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("Paris", {"type": "string"}, "Paris"),
        ("3", {"type": "string"}, "3"),
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "number"}, 3),
        (" 3.5\n", {"type": "number"}, 3.5),
        ("3.5", {"type": "integer"}, 3.5),
        ("5.0", {"type": "number"}, 5),
        ("1e3", {"type": "number"}, 1000),
        ("1e999", {"type": "number"}, "1e999"),
        ("007", {"type": "integer"}, 7),
        ("[1]", {"type": "integer"}, [1]),
        ("5", {"type": ["string", "integer"]}, 5),
        ("5.0", {"type": ["string", "integer"]}, "5.0"),
        ("many", {"type": "integer"}, "many"),
        ("True", {"type": "boolean"}, True),
        ("FALSE", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, True),
        ("0", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("null", {"type": "integer"}, None),
        ("null", {"type": ["string", "integer"]}, "null"),
        ("None", {"type": ["object", "null"]}, None),
        ("None", {"type": ["string", "null"]}, "None"),
        ('"Paris"', {"type": ["string", "null"]}, '"Paris"'),
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
        ("{'a', 'b'}", ["a", "b"]),
        ("{'a': {1, (2,)}, 'b': {}}", {"a": [1, [2]], "b": {}}),
        ("{'a:', 'b'}", ["a:", "b"]),
        ("[07, -007, 00, 1_000, 07.5, 1.07, 0.5, 1e05, 1.]", [7, -7, 0, 1000, 7.5, 1.07, 0.5, 1e5, 1.0]),
        ("2024-07-01", "2024-07-01"),
        ("x07", "x07"),
        ("f(1)", "f(1)"),
        ("{1: 2}", "{1: 2}"),
        ("'open", "'open"),
        ("1 +", "1 +"),
    ],
)
def test_python_literals_become_json(literal: str, value: object):
    assert json.loads(from_python(literal)) == value


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("[f(a='b', c=\"it's\")]", "[f(a='b', c=\"it's\")]"),
        ("[f(a='it's')]", r"[f(a='it\'s')]"),
        ("[f(a=['it's', 2]), g(b={'c': 'd'})]", r"[f(a=['it\'s', 2]), g(b={'c': 'd'})]"),
        ("[f(a='print('x'))')]", r"[f(a='print(\'x\'))')]"),
        (r"[f(a='\'b' c')]", r"[f(a='\'b\' c')]"),
        ("[f(a='b 'c', d', e='f')]", None),
        ("[f(a='it's)]", None),
        ("[f(a='b)]", None),
    ],
)
def test_a_string_that_contains_its_own_quotes_is_escaped_if_one_end_alone_fits(text: str, escaped: str | None):
    assert with_quotes_escaped(text) == escaped
