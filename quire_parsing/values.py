"""Values of arguments as JSON text, from the forms in which models write them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
ALL_TYPES = frozenset({*_TYPES.values(), "null"})
STRING = frozenset({"string"})
_PYTHON_TOKEN = re.compile(
    r"""'(?:[^'\\]|\\.)*+(?:'|\Z)|"(?:[^"\\]|\\.)*+(?:"|\Z)|[A-Za-z_]\w*|[()]|,(?=\s*[)\]}])""", re.DOTALL
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]", ",": ""}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class SchemaTypes(frozenset[str]):
    """The JSON types that a schema allows. schema: itself, for formats that write the parts of a value one by one"""

    schema: Any = None


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_json(text: str) -> str:
    """The text, or a part of it, as it is between the quotes of a JSON string."""
    return json_text(text)[1:-1]


def parsed(text: str) -> Any:
    """The value of a JSON text. None if it is null, not JSON, or nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def without_surrogates(text: str) -> str:
    """The text with pairs of surrogates as characters, and single ones, which UTF-8 cannot hold, as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, SchemaTypes]]:
    """function → parameter → the JSON types that its schema allows.

    tools: the definitions of a request: {"type": "function", "function": {"name": ..., "parameters": {...}}}
    """
    types = {}
    for tool in tools:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties")
        properties = properties if isinstance(properties, dict) else {}
        types[function.get("name", "")] = {name: schema_types(schema) for name, schema in properties.items()}
    return types


def schema_types(schema: Any) -> SchemaTypes:
    types = SchemaTypes(_types(schema))
    types.schema = schema
    return types


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that was written without its type, such as `5` or `Paris`."""
    word = text.strip().lower()
    if word == "null" or (word == "none" and "string" not in types):
        return "null"
    for candidate in (word if word in ("true", "false") else text, from_python(text)):
        kind = _TYPES.get(type(parsed(candidate)))
        if kind in types or (kind == "integer" and "number" in types):
            return candidate.strip()
    return json_text(text)


def from_python(text: str) -> str:
    """The JSON text of a Python literal. Text that is no literal becomes a string."""
    converted = _PYTHON_TOKEN.sub(_convert, text)
    return converted if converted == "null" or parsed(converted) is not None else json_text(text)


def _types(schema: Any, depth: int = 0) -> frozenset[str]:
    """The types that a schema allows: all of them if it does not say, or says nonsense."""
    if not isinstance(schema, dict) or depth > 8:
        return ALL_TYPES
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list) and options and "type" not in schema:
            return frozenset().union(*(_types(option, depth + 1) for option in options))
    values = schema.get("enum", [schema.get("const")] if "const" in schema else [])
    values = values if isinstance(values, list) else []
    inferred = ["null" if value is None else _TYPES.get(type(value), "") for value in values]
    inferred += ["object"] * ("properties" in schema) + ["array"] * ("items" in schema)
    declared = schema.get("type")
    declared = [declared] if isinstance(declared, str) else declared
    return ALL_TYPES.intersection(map(str, declared if isinstance(declared, list) else inferred)) or ALL_TYPES


def _convert(match: re.Match[str]) -> str:
    token = match[0]
    if token[0] in "'\"" and token[-1] == token[0] != token:
        return json_text(without_surrogates(_ESCAPE.sub(_unescape, token[1:-1])))
    return _PYTHON_WORDS.get(token, token)


def _unescape(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) > 1:
        code = int(escape[1:], 16)
        return chr(code) if code <= 0x10FFFF else match[0]
    return _ESCAPES.get(escape, escape if escape in "\\'\"" else match[0])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
