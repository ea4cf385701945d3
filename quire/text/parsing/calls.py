"""The machine that reads tool calls. What differs between families of models is in a ToolFormat."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire.text.parsing.events import Parser
from quire.text.parsing.reader import Parsing, Reader, Steps
from quire.text.parsing.values import (
    STRING,
    from_python,
    json_text,
    json_value,
    parameter_types,
    typed,
    without_surrogates,
)

Types = Mapping[str, Mapping[str, frozenset[str]]]  # function → parameter → the JSON types that it may have

_LONGEST_HEADER = 300  # characters
_KEY = re.compile(r'\s*([^"<]*)(?:"\s+string="(\w+))?')  # city</arg_key>, or city" string="true
_ARGUMENTS_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id")


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models writes tool calls.

    begin, end: markers around a call. sections: markers that stand before the first of several calls
    bare: the characters that begin a call without a marker, at the beginning of the answer
    body: reads a call, from behind the `begin` marker
    header: for some bodies, what stands between the marker and the arguments: a pattern with the groups "name" and "id"
    parameter: for the body `tagged`: the marker before a parameter's name, those behind it, those behind the value
    needs_special_tokens: the markers are special tokens, which must not be left out of the text
    whole: reads whole answers in place of `read_calls`, for a format in which reasoning and calls are one
    """

    body: "Callable[[Reader, ToolFormat, Types], Steps[None]] | None" = None
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    bare: str = ""
    header: str = ""
    parameter: tuple[str, tuple[str, ...], tuple[str, ...]] = ("", (), ())
    needs_special_tokens: bool = True
    whole: Callable[[Reader], Steps[None]] | None = None

    def make(self, tools: Sequence[Mapping[str, Any]] = ()) -> Parser:
        """A parser of one answer. tools: the definitions in the request, whose types decide how some values are read"""
        return Parsing(self.whole) if self.whole else Parsing(read_calls, self, parameter_types(tools))


def read_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads an answer: content, and calls in it."""
    is_bare = False
    if format.bare:
        reader.attempt("")
        char = yield from reader.space()
        is_bare = bool(char) and char in format.bare
    ends: tuple[str, ...] = ()
    while True:
        if not is_bare:
            reader.give_up()
            marker = yield from reader.until((*format.begin, *format.sections, *ends), reader.content)
            if marker is None:
                break
            if marker not in format.begin:
                if marker in format.sections:
                    reader.hold(marker)
                continue
            if marker[-1] in format.bare:
                marker = reader.unread(marker)
            reader.attempt(marker)
        is_bare = False
        if format.body:
            yield from format.body(reader, format, types)
        ends = () if reader.is_attempting else format.end
    reader.end()


def json_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads {"name": "f", "arguments": {...}}, or several of these, in a list or with ";", "," or white space between
    them. Calls without a marker are told from other JSON by their keys."""
    is_list = (yield from reader.space()) == "[" and (yield from reader.literal("["))
    yield from reader.space()
    while (yield from _json_call(reader, bool(format.bare))):
        separator = yield from reader.space()
        if is_list and separator == "]":
            yield from reader.literal("]")
            return
        if separator not in (";", ",", "{"):
            return
        reader.attempt("")
        if separator != "{":
            yield from reader.literal(separator)
            yield from reader.space()


def _json_call(reader: Reader, is_bare: bool) -> Steps[bool]:
    """Reads an object that is a call. Whether it is one, and complete."""
    name: str | None = None
    early: list[str] = []  # arguments that come before the name
    is_called = False
    if not (yield from reader.literal("{")):
        return False
    while True:
        pieces: list[str] = []
        if (yield from reader.space()) != '"' or not (yield from reader.value(pieces.append)):
            return False
        key = _parsed("".join(pieces))
        yield from reader.space()
        if not (yield from reader.literal(":")):
            return False
        yield from reader.space()
        if key in _ARGUMENTS_KEYS and not is_called:
            if name:
                reader.call(name)
                is_called = True
            if not (yield from _arguments(reader, reader.arguments if name else early.append)):
                return False
        elif key == "name" and not name:
            pieces = []
            if not (yield from reader.value(pieces.append)):
                return False
            name = _parsed("".join(pieces))
            if not (isinstance(name, str) and name and name.isprintable()):
                return False
            if early:
                reader.call(name)
                reader.arguments("".join(early))
                is_called = True
        elif (is_bare and key not in _OTHER_KEYS) or not (yield from reader.value(_ignore)):
            return False
        separator = yield from reader.space()
        if separator == "}":
            break
        if not (yield from reader.literal(",")):
            return False
    if name and not is_called and not is_bare:
        reader.call(name)
        reader.arguments("{}")
        is_called = True
    yield from reader.literal("}")
    return is_called


def _arguments(reader: Reader, say: Callable[[str], None]) -> Steps[bool]:
    """Reads arguments in JSON. An object passes as it arrives; other values are read whole: null, or an object that is
    itself written as a JSON string."""
    char = yield from reader.space()
    if char == "{":
        return (yield from reader.value(say))
    pieces: list[str] = []
    is_complete = yield from reader.value(pieces.append)
    text = "".join(pieces)
    value = _parsed(text) if is_complete else None
    say(without_surrogates(value) if isinstance(value, str) and value else text if value is not None else "{}")
    return is_complete


def headed_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads a header with the name, and arguments in JSON."""
    header = yield from _header(reader, format, "{")
    if header is not None:
        reader.call(header["name"], header.groupdict().get("id"))
        if (yield from reader.space()):
            yield from _arguments(reader, reader.arguments)


def json_or_headed_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    is_json = (yield from reader.space()) in ("[", "{")
    yield from (json_calls if is_json else headed_call)(reader, format, types)


def tagged_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads a header with the name, and parameters between tags: <parameter=city>Paris</parameter>."""
    opening, key_ends, value_ends = format.parameter
    header = yield from _header(reader, format, opening)
    if header is None:
        return
    reader.call(header["name"])
    reader.arguments("{")
    separator = ""
    marker = yield from reader.until((opening, *format.end), reader.content)
    while marker and marker.endswith(opening):
        found = yield from reader.before(key_ends, _LONGEST_HEADER)
        if found is None:
            reader.content(marker)
            marker = yield from reader.until((opening, *format.end), reader.content)
            continue
        yield from reader.literal(found[1])
        key, is_string = _KEY.findall(found[0])[0]
        allowed = STRING if is_string == "true" else types.get(header["name"], {}).get(key, STRING)
        reader.arguments(f"{separator}{json_text(key)}: ")
        separator = ", "
        marker = yield from _tagged_value(reader, allowed, value_ends)
        if marker and not marker.endswith((opening, *format.end)):
            marker = yield from reader.until((opening, *format.end), reader.content)
    if marker:
        reader.arguments("}")


def _tagged_value(reader: Reader, types: frozenset[str], ends: tuple[str, ...]) -> Steps[str | None]:
    """Reads a value up to a marker, which is returned. A string is told as it arrives, other values whole."""
    if types == STRING:
        reader.arguments('"')
        marker = yield from reader.until(ends, lambda text: reader.arguments(json_text(text)[1:-1]))
        if marker:
            reader.arguments('"')
        return marker
    pieces: list[str] = []
    marker = yield from reader.until(ends, pieces.append)
    text = "".join(pieces)
    reader.arguments(typed(text, types) if marker else text)
    return marker


def pythonic_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads calls in Python: [f(city="Paris", days=2), g()]. Keywords and literals alone are calls."""
    yield from reader.space()
    is_list = yield from reader.literal("[")
    while True:
        yield from reader.space()
        name = yield from reader.word()
        if not name or not (yield from reader.literal("(")):
            return
        if not (yield from _python_arguments(reader, name)):
            return
        separator = yield from reader.space()
        if is_list and separator == "]":
            yield from reader.literal("]")
            return
        if separator != "," and (is_list or not separator.isidentifier()):
            return
        reader.attempt("")
        yield from reader.literal(",")


def _python_arguments(reader: Reader, name: str) -> Steps[bool]:
    """Reads keyword arguments up to ")". Whether they are complete."""
    separator = "{"
    while True:
        if (yield from reader.space()) == ")":
            yield from reader.literal(")")
            if separator == "{":
                reader.call(name)
            reader.arguments("{}" if separator == "{" else "}")
            return True
        key = yield from reader.word()
        yield from reader.space()
        if not key or not (yield from reader.literal("=")):
            return False
        if separator == "{":
            reader.call(name)
        reader.arguments(f"{separator}{json_text(key)}: ")
        separator = ", "
        yield from reader.space()
        pieces: list[str] = []
        is_complete = yield from reader.value(pieces.append)
        text = "".join(pieces)
        reader.arguments(from_python(text) if is_complete else text)
        if not is_complete or ((yield from reader.space()) != ")" and not (yield from reader.literal(","))):
            return False


def _header(reader: Reader, format: ToolFormat, opening: str) -> Steps[re.Match[str] | None]:
    """Reads what stands between a call's marker and its arguments."""
    found = yield from reader.before((opening, *format.end), _LONGEST_HEADER)
    return re.fullmatch(format.header, found[0]) if found else None


def _parsed(text: str) -> Any:
    """The value of a JSON text, None if it is not JSON."""
    try:
        return json_value(text)
    except ValueError:
        return None


def _ignore(text: str) -> None:
    pass
