"""The machine that reads tool calls. What differs between families of models is in a ToolFormat."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire_parsing.events import Parser
from quire_parsing.reader import Parsing, Reader, Steps
from quire_parsing.values import STRING, from_python, json_text, parameter_types, parsed, typed, without_surrogates

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
    sign: text by which a chat template tells the format, if there are no markers, or if others have the same
    needs_special_tokens: the markers may be special tokens, which must not be left out of the text
    whole: reads whole answers in place of `read_calls`, for a format in which reasoning and calls are one
    names, arguments: for JSON: the keys of a call's name and arguments. Without names, a call is {name: arguments}
    key: for the body `annotated_call`: what follows the marker before a parameter: a pattern with the group "name", and
        "type" if the model writes the type of the value
    is_escaped: for the body `annotated_call`: XML's entities stand for characters of values
    quote: for the body `braced_call`: the marker before and behind strings
    noise: special tokens that are not content
    is_suffixed: checkpoints may append a suffix to the names of their markers, as in <tool_call:abc>
    """

    body: "Callable[[Reader, ToolFormat, Types], Steps[None]] | None" = None
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    bare: str = ""
    header: str = ""
    parameter: tuple[str, tuple[str, ...], tuple[str, ...]] = ("", (), ())
    sign: str = ""
    needs_special_tokens: bool = True
    whole: Callable[[Reader, Types], Steps[None]] | None = None
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = _ARGUMENTS_KEYS
    key: str = ""
    is_escaped: bool = False
    quote: str = ""
    noise: tuple[str, ...] = ()
    is_suffixed: bool = False

    def make(self, tools: Sequence[Mapping[str, Any]] = ()) -> Parser:
        """A parser of one answer. tools: the definitions in the request, whose types decide how some values are read"""
        types = parameter_types(tools)
        return Parsing(self.whole, types) if self.whole else Parsing(read_calls, self, types)


def read_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads an answer: content, and calls in it."""
    reader.hold("", True)
    char = yield from reader.space()
    if char and char in format.bare and format.body:
        yield from format.body(reader, format, types)
    while True:
        ends = format.end if reader.num_calls and not reader.is_attempt else ()
        reader.give_up()
        marker = yield from reader.until((*format.begin, *format.sections, *format.noise, *ends), reader.content)
        if marker is None:
            return reader.end()
        if marker not in (*ends, *format.noise):
            reader.hold(reader.unread(marker) if marker[-1] in format.bare else marker, marker in format.begin)
        if reader.is_attempt and format.body:
            yield from format.body(reader, format, types)


def json_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads {"name": "f", "arguments": {...}}, or several of these, in a list or with ";", "," or white space between
    them; if the format has headers, also a header with the name and then the arguments. Calls without a marker are told
    from other JSON by their keys."""
    char = yield from reader.space()
    if format.header and char not in ("[", "{"):
        if header := (yield from _header(reader, format, "{")):
            reader.call(header["name"], header.groupdict().get("id"))
            if (yield from reader.space()):
                yield from _arguments(reader, reader.arguments)
        return
    is_list = yield from reader.literal("[")
    yield from reader.space()
    while (yield from _json_call(reader, format)):
        separator = yield from reader.space()
        if is_list and (yield from reader.literal("]")):
            return
        if separator not in (";", ",", "{"):
            return
        reader.hold("", True)
        if separator != "{":
            yield from reader.literal(separator)
            yield from reader.space()


def _json_call(reader: Reader, format: ToolFormat) -> Steps[bool]:
    """Reads an object that is a call. Whether it is one, and complete."""
    is_bare = bool(format.bare)
    name: Any = None
    early: list[str] = []  # arguments that come before the name
    num_calls = reader.num_calls
    separator = "{"
    while (yield from reader.literal(separator)):
        yield from reader.space()
        key = parsed((yield from reader.whole_value())[0])
        yield from reader.space()
        if not isinstance(key, str) or not (yield from reader.literal(":")):
            return False
        yield from reader.space()
        if not format.names:
            if not _is_name(key):
                return False
            reader.call(key)
            is_complete = yield from _arguments(reader, reader.arguments)
        elif key in format.arguments and num_calls == reader.num_calls:
            if name:
                reader.call(name)
            is_complete = yield from _arguments(reader, reader.arguments if name else early.append)
        elif key in format.names and not name:
            name = parsed((yield from reader.whole_value())[0])
            is_complete = _is_name(name)
            if early and is_complete:
                reader.call(name)
                reader.arguments("".join(early))
        else:
            is_complete = (not is_bare or key in _OTHER_KEYS) and (yield from reader.whole_value())[1]
        if not is_complete:
            return False
        separator = ","
        if (yield from reader.space()) == "}":
            break
    if name and num_calls == reader.num_calls and not is_bare and (yield from reader.space()) == "}":
        reader.call(name)
        reader.arguments("{}")
    return num_calls < reader.num_calls and (yield from reader.literal("}"))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and value != ""


def _arguments(reader: Reader, say: Callable[[str], None]) -> Steps[bool]:
    """Reads arguments in JSON. An object passes as it arrives; other values are read whole: null, or an object that is
    itself written as a JSON string."""
    if (yield from reader.space()) == "{":
        return (yield from reader.value(say))
    text, is_complete = yield from reader.whole_value()
    value = parsed(text) if is_complete else text
    say((without_surrogates(value) if isinstance(value, str) else text if value is not None else "") or "{}")
    return is_complete


def tagged_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads a header with the name, and parameters between tags: <parameter=city>Paris</parameter>."""
    opening, key_ends, value_ends = format.parameter
    header = yield from _header(reader, format, opening)
    if header is None:
        return
    reader.call(header["name"])
    separator = "{"
    marker: str | None = ""
    while marker is not None:
        if not marker.endswith((opening, *format.end)):
            marker = yield from reader.until((opening, *format.end), reader.content)
        elif not marker.endswith(opening):
            return reader.arguments("{}" if separator == "{" else "}")
        elif found := (yield from reader.before(key_ends, _LONGEST_HEADER)):
            yield from reader.literal(found[1])
            key, is_string = _KEY.findall(found[0])[0]
            reader.arguments(f"{separator}{json_text(key)}: ")
            separator = ", "
            allowed = STRING if is_string == "true" else types.get(header["name"], {}).get(key, STRING)
            marker = yield from _tagged_value(reader, allowed, value_ends)
        else:
            reader.content(marker)
            marker = ""


def _tagged_value(reader: Reader, types: frozenset[str], ends: tuple[str, ...]) -> Steps[str | None]:
    """Reads a value up to a marker, which is returned. A string is told as it arrives, other values whole."""
    pieces: list[str] = []
    is_string = types == STRING
    reader.arguments('"' * is_string)
    marker = yield from reader.until(
        ends, (lambda text: reader.arguments(json_text(text)[1:-1])) if is_string else pieces.append
    )
    text = "".join(pieces)
    if marker:
        text = '"' if is_string else typed(text, types)
    reader.arguments(text)
    return marker


def pythonic_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads calls in Python: [f(city="Paris", days=2), g()]. Keywords and literals alone are calls."""
    yield from reader.space()
    is_list = yield from reader.literal("[")
    separator = ","
    while separator == "," or (not is_list and separator.isidentifier()):
        reader.hold("", True)
        yield from reader.literal(",")
        yield from reader.space()
        name = yield from reader.word()
        if not name or not (yield from reader.literal("(")) or not (yield from _python_arguments(reader, name)):
            return
        separator = yield from reader.space()
        if is_list and (yield from reader.literal("]")):
            return


def _python_arguments(reader: Reader, name: str) -> Steps[bool]:
    """Reads keyword arguments up to ")". Whether they are complete."""
    separator = "{"
    while (yield from reader.space()) != ")":
        key = yield from reader.word()
        yield from reader.space()
        if not key or not (yield from reader.literal("=")):
            return False
        if separator == "{":
            reader.call(name)
        reader.arguments(f"{separator}{json_text(key)}: ")
        separator = ", "
        yield from reader.space()
        text, is_complete = yield from reader.whole_value()
        reader.arguments(from_python(text) if is_complete else text)
        if not is_complete or ((yield from reader.space()) != ")" and not (yield from reader.literal(","))):
            return False
    if separator == "{":
        reader.call(name)
    reader.arguments("{}" if separator == "{" else "}")
    return (yield from reader.literal(")"))


def _header(reader: Reader, format: ToolFormat, opening: str) -> Steps[re.Match[str] | None]:
    """Reads what stands between a call's marker and its arguments."""
    found = yield from reader.before((opening, *format.end), _LONGEST_HEADER)
    return re.fullmatch(format.header, found[0].strip()) if found else None
