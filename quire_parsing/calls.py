"""The machine that reads tool calls. What differs between families of models is in a ToolFormat."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire_parsing.events import Parser
from quire_parsing.reader import Parsing, Reader, Steps
from quire_parsing.values import (
    ALL_TYPES,
    STRING,
    from_python,
    json_text,
    parameter_types,
    parsed,
    typed,
    without_surrogates,
)

Types = Mapping[str, Mapping[str, frozenset[str]]]  # function → parameter → the JSON types that it may have

LONGEST_HEADER = 300  # characters
_DECLARED = {"true": STRING, **{kind: frozenset({kind}) for kind in ALL_TYPES}}  # types that the model itself writes
_CDATA = "<![CDATA["
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&amp;": "&"}
_OTHER_KEYS = ("type", "id")


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models writes tool calls.

    begin, end: markers around a call. sections: markers that stand before the first of several calls
    bare: the characters that begin a call without a marker, at the beginning of the answer
    body: reads a call, from behind the `begin` marker
    header: for some bodies, what stands between the marker and the arguments: a pattern with the groups "name" and "id"
    parameter: for the body `tagged`: the marker before a parameter's name, those behind it, those behind the value
    key: for the body `tagged`: what is between those markers: a pattern with the group "name", and "type" if the model
        writes the type of the value. escaped: its values have XML's entities
    names, arguments: for JSON: the keys of a call's name and arguments. Without names, a call is {name: arguments}
    quote: for the body `braced`: the marker before and behind strings
    wrapper: markers around the answer, which are left out
    sign: text by which a chat template tells the format, if there are no markers, or if others have the same
    is_suffixed: checkpoints may append a suffix to the names of their markers, as in <tool_call:abc>
    needs_special_tokens: the markers may be special tokens, which must not be left out of the text
    whole: reads whole answers in place of `read_calls`, for a format in which reasoning and calls are one
    """

    body: "Callable[[Reader, ToolFormat, Types], Steps[None]] | None" = None
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    bare: str = ""
    header: str = ""
    parameter: tuple[str, tuple[str, ...], tuple[str, ...]] = ("", (), ())
    key: str = r'\s*(?P<name>[^"<]*)(?:"\s+string="(?P<type>\w+))?'  # city</arg_key>, or city" string="true
    escaped: bool = False
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    quote: str = ""
    wrapper: tuple[str, ...] = ()
    sign: str = ""
    is_suffixed: bool = False
    needs_special_tokens: bool = True
    whole: Callable[[Reader, Types], Steps[None]] | None = None

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
        left_out = (*ends, *format.wrapper)
        marker = yield from reader.until((*format.begin, *format.sections, *left_out), reader.content)
        if marker is None:
            return reader.end()
        if marker not in left_out:
            reader.hold(reader.unread(marker) if marker[-1] in format.bare else marker, marker in format.begin)
        if reader.is_attempt and format.body:
            yield from format.body(reader, format, types)


def json_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads {"name": "f", "arguments": {...}}, or several of these, in a list or with ";", "," or white space between
    them; if the format has headers, also a header with the name and then the arguments. Calls without a marker are told
    from other JSON by their keys."""
    char = yield from reader.space()
    if format.header and char not in ("[", "{"):
        if header := (yield from call_header(reader, format, "{")):
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
            is_complete = _is_name(key)
            if is_complete:
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
    header = yield from call_header(reader, format, opening)
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
        elif found := (yield from reader.before(key_ends, LONGEST_HEADER)):
            yield from reader.literal(found[1])
            key, kind = _key(found[0], format)
            reader.arguments(f"{separator}{json_text(key)}: ")
            separator = ", "
            allowed = _DECLARED.get(kind) or types.get(header["name"], {}).get(key, STRING)
            is_cdata = found[1].endswith(_CDATA)
            ends = tuple(f"]]>{end}" for end in value_ends) if is_cdata else value_ends
            marker = yield from tagged_value(reader, allowed, ends, format.escaped and not is_cdata)
        else:
            reader.content(marker)
            marker = ""


def wrapped_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads JSON or parameters between tags, whichever the model wrote."""
    body = json_calls if (yield from reader.space()) in ("{", "[") else tagged_call
    yield from body(reader, format, types)


def _key(text: str, format: ToolFormat) -> tuple[str, str]:
    """(name of a parameter, the type of its value if the model wrote one)"""
    found = re.match(format.key, text)
    groups = found.groupdict() if found else {}
    return _unescaped(groups.get("name") or ""), (groups.get("type") or "")


def _unescaped(text: str) -> str:
    for entity, character in _ENTITIES.items():
        text = text.replace(entity, character)
    return text


def tagged_value(
    reader: Reader, types: frozenset[str], ends: tuple[str, ...], is_escaped: bool = False
) -> Steps[str | None]:
    """Reads a value up to a marker, which is returned. A string is told as it arrives, other values whole."""
    pieces: list[str] = []
    is_string = types == STRING
    entities = tuple(_ENTITIES) if is_escaped else ()
    reader.arguments('"' * is_string)

    def say(text: str) -> None:
        if is_string:
            reader.arguments(json_text(text)[1:-1])
        else:
            pieces.append(text)

    while (marker := (yield from reader.until((*ends, *entities), say))) in entities:
        say(_ENTITIES[marker])
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


def call_header(reader: Reader, format: ToolFormat, *openings: str) -> Steps[re.Match[str] | None]:
    """Reads what stands between a call's marker and its arguments, which begin with one of the openings."""
    found = yield from reader.before((*openings, *format.end), LONGEST_HEADER)
    return re.fullmatch(format.header, found[0].strip()) if found else None
