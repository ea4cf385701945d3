"""Converts argument values from the forms that models write to JSON text."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
ALL_TYPES = frozenset({*_TYPES.values(), "null"})
STRING = frozenset({"string"})
_NUMBERS = frozenset({"integer", "number"})
_PYTHON_TOKEN = re.compile(
    r"""'(?:[^'\\]|\\.)*+(?:'|\Z)|"(?:[^"\\]|\\.)*+(?:"|\Z)|[A-Za-z_]\w*|[()\[\]{}:]|,(?=\s*[)\]}])"""
    r"""|(?<![\w.])\d[\d_]*+(?:\.[\d_]*+)?+(?:[eE][+-]?\d++)?+(?![\w.])""",
    re.DOTALL,
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]", ",": ""}
_QUOTE_OR_BRACKET = re.compile(r"""["'()\[\]{}]""")
_IN_STRING = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in "\"'"}
_FITS_BEHIND_STRING = re.compile(r"\s*[,)\]}:]")
_MOST_ENDS = 100  # possible ends that are tried for a string with unescaped quotes
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class SchemaTypes(frozenset[str]):
    """The JSON types that a schema allows. schema: the schema itself, for formats that write a value in parts"""

    schema: Any = None


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_json(text: str) -> str:
    """Return the text, or a part of it, escaped for the inside of a JSON string."""
    return json_text(text)[1:-1]


def parsed(text: str) -> Any:
    """Return the value of a JSON text. None if it is null, not JSON, nested too deeply, or contains too large a
    number."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def without_surrogates(text: str) -> str:
    """Return the text with surrogate pairs joined to characters, and lone surrogates, which UTF-8 cannot encode, as
    U+FFFD."""
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


def typed(text: str, types: frozenset[str], may_be_json: bool = False) -> str:
    """Return the JSON text of a value that was written without its type, such as `5` or `Paris`.

    The types are tried in the order null, integer, number, boolean, object, array, string, as in vLLM. A value that
    matches none of them is read as JSON, or else as a string. may_be_json: a string may be written in quotes, as JSON
    """
    word = text.strip()
    lower = word.lower()
    may_be_string = "string" in types
    if (lower == "null" and ("null" in types or not may_be_string)) or (lower == "none" and not may_be_string):
        return "null"
    if number := _number(word, types):
        return number
    if "boolean" in types and lower in ("true", "1", "false", "0"):
        return "true" if lower in ("true", "1") else "false"
    for candidate in (word, from_python(word)):
        kind = _TYPES.get(type(parsed(candidate)))
        if kind in types and (kind != "string" or (may_be_json and candidate is word)):
            return candidate
    return word if not may_be_string and parsed(word) is not None else json_text(text)


def _number(word: str, types: frozenset[str]) -> str:
    """Return a number as JSON, without a fraction if it is an integer. "" if the word is not a number, or the types do
    not allow one."""
    if not types & _NUMBERS:
        return ""
    try:
        return str(int(word))
    except ValueError:
        pass
    try:
        value = float(word) if "number" in types else math.nan
    except ValueError:
        return ""
    if not math.isfinite(value):
        return ""
    return str(int(value)) if value.is_integer() else json_text(value)


def from_python(text: str) -> str:
    """Return the JSON text of a Python literal. Text that is not a literal becomes a string."""
    pieces: list[str] = []
    open_braces: list[int] = []  # indices in `pieces` of braces that may begin a set
    end = 0
    for match in _PYTHON_TOKEN.finditer(text):
        pieces += (text[end : match.start()], _converted(match[0]))
        end = match.end()
        if match[0] in ("{", "[", "("):
            open_braces.append(len(pieces) - 1)
        elif match[0] == ":" and open_braces:
            open_braces[-1] = -1
        elif match[0] in ("}", "]", ")") and open_braces:
            start = open_braces.pop()
            has_members = any(piece.strip() for piece in islice(pieces, start + 1, len(pieces) - 1))
            if match[0] == "}" and start >= 0 and pieces[start] == "{" and has_members:
                pieces[start], pieces[-1] = "[", "]"
    converted = "".join((*pieces, text[end:]))
    return converted if converted == "null" or parsed(converted) is not None else json_text(text)


def with_quotes_escaped(text: str) -> str | None:
    """Escape quotes within strings of Python calls: f(a='it's') becomes f(a='it\\'s').

    A quote only ends a string if a valid character, such as a comma or a bracket, follows it. Among these quotes, the
    one after which the rest is well-formed is chosen. None if there is no such quote, or more than one.
    """
    brackets = ""  # those that are open
    position = 0
    while match := _QUOTE_OR_BRACKET.search(text, position):
        position = match.end()
        if match[0] not in _IN_STRING:
            brackets = _open_behind(brackets, match[0])
            continue
        quotes = [found for found in _IN_STRING[match[0]].finditer(text, position) if found[0] == match[0]]
        if not quotes:
            return None
        if _FITS_BEHIND_STRING.match(text, quotes[0].end()):
            position = quotes[0].end()
            continue
        ends = [quote.start() for quote in quotes if _FITS_BEHIND_STRING.match(text, quote.end())]
        ends = [end for end in ends[:_MOST_ENDS] if _is_rest_of_calls(text, end + 1, brackets)]
        if len(ends) != 1:
            return None
        pieces = [text[:position]]
        for quote in quotes:
            if quote.start() < ends[0]:
                pieces += (text[position : quote.start()], "\\", match[0])
                position = quote.end()
        return "".join(pieces) + text[position:]
    return text


def _is_rest_of_calls(text: str, position: int, brackets: str) -> bool:
    """Whether the strings from a position on are complete, and all brackets are closed. brackets: those open there"""
    while match := _QUOTE_OR_BRACKET.search(text, position):
        position = match.end()
        if match[0] not in _IN_STRING:
            brackets = _open_behind(brackets, match[0])
        else:
            quotes = (found for found in _IN_STRING[match[0]].finditer(text, position) if found[0] == match[0])
            if (quote := next(quotes, None)) is None or not _FITS_BEHIND_STRING.match(text, quote.end()):
                return False
            position = quote.end()
        if not brackets or brackets[-1] in ")]}":
            return not brackets and not text[position:].strip()
    return False


def _open_behind(brackets: str, bracket: str) -> str:
    """Return the brackets that are open after a bracket. A closing bracket without a matching open one is added at the
    end."""
    is_pair = brackets[-1:] + bracket in ("()", "[]", "{}")
    return brackets[:-1] if is_pair else brackets + bracket


def _types(schema: Any, depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows: all types if the schema has none, or invalid ones."""
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


def _converted(token: str) -> str:
    """Convert a Python token to JSON. Numbers lose leading zeros and underscores."""
    if token[0] in "'\"" and token[-1] == token[0] != token:
        return json_text(without_surrogates(_ESCAPE.sub(_unescape, token[1:-1])))
    if token[0].isdecimal():
        digits = token.replace("_", "").lstrip("0")
        return "0" * (not digits[:1].isdecimal()) + digits + "0" * digits.endswith(".")
    return _PYTHON_WORDS.get(token, token)


def _unescape(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) > 1:
        code = int(escape[1:], 16)
        return chr(code) if code <= 0x10FFFF else match[0]
    return _ESCAPES.get(escape, escape if escape in "\\'\"" else match[0])


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
