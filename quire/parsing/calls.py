"""Reads tool calls. A ToolFormat describes the format of a model family."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire.parsing.events import Parser
from quire.parsing.reader import Parsing, Reader, Steps
from quire.parsing.values import (
    ALL_TYPES,
    STRING,
    from_python,
    json_text,
    parameter_types,
    parsed,
    typed,
    with_quotes_escaped,
    without_surrogates,
)

Types = Mapping[str, Mapping[str, frozenset[str]]]  # function → parameter → its allowed JSON types

_LONGEST_HEADER = 300  # characters
_LONGEST_ECHO = 4000
_KEY = re.compile(r'\s*([^"<]*)(?:"\s+string="(\w+))?')  # city</arg_key>, or city" string="true
_ARGUMENTS_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id")


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models writes tool calls.

    begin, end: markers around a call.
    sections: markers before the first of several calls.
    bare: the characters that start a call without a marker, at the beginning of the answer or after a text in `leads`.
    leads: texts in the content after which a call may start without a marker.
    fences: texts before JSON objects, or including their beginnings; such an object, also at the beginning of the
        answer, is a call if it names a function of the request.
    noise: special tokens that are not content.
    echoes: the model may repeat the text of a call after it, and end it with another `end` marker.
    body: reads a call, starting after the `begin` marker.
    header: for some bodies, the text between the marker and the arguments: a pattern with the groups "name" and "id".
    parameter: for the body `tagged`: the marker before a parameter's name, those after it, those after the value.
    tells_strings: a parameter's name is followed by string="true" or "false", or nothing, which means "false".
    wrappers: parameters in which the model may write all arguments as an object, if the function has no such parameter.
    ids: the form of the ids that the chat template needs, with {name} and {index}; "" if any will do.
    sign: text that identifies the format in a chat template, if there are no markers or other formats share them.
    needs_special_tokens: the markers may be special tokens, which must not be skipped in the text.
    whole: reads whole answers instead of `read_calls`, for a format that combines reasoning and calls.
    names, arguments: for JSON: the keys of a call's name and arguments. Without names, a call is {name: arguments}.
    key: for the body `annotated_call`: the text after the marker before a parameter: a pattern with the group "name",
        and "type" if the model writes the value's type.
    is_escaped: for the body `annotated_call`: values contain XML entities.
    quote: for the body `braced_call`: the marker before and after strings.
    is_suffixed: checkpoints may append a suffix to the names of their markers, as in <tool_call:abc>.
    """

    body: "Callable[[Reader, ToolFormat, Types], Steps[None]] | None" = None
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    bare: str = ""
    leads: tuple[str, ...] = ()
    fences: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    echoes: bool = False
    header: str = ""
    parameter: tuple[str, tuple[str, ...], tuple[str, ...]] = ("", (), ())
    tells_strings: bool = False
    wrappers: tuple[str, ...] = ()
    ids: str = ""
    sign: str = ""
    needs_special_tokens: bool = True
    whole: Callable[[Reader, Types], Steps[None]] | None = None
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = _ARGUMENTS_KEYS
    key: str = ""
    is_escaped: bool = False
    quote: str = ""
    is_suffixed: bool = False

    def make(self, tools: Sequence[Mapping[str, Any]] = (), noise: tuple[str, ...] = ()) -> Parser:
        """Return a parser of one answer.

        tools: the request's definitions, whose types decide how some values are read. noise: further noise tokens
        """
        types = parameter_types(tools)
        if self.whole:
            return Parsing(self.whole, types)
        format = msgspec.structs.replace(self, noise=(*self.noise, *noise)) if noise else self
        return Parsing(read_calls, format, types)


def read_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads an answer: content, and calls in it."""
    yield from _bare_call(reader, format, types)
    while True:
        ends = format.end if reader.num_calls and not reader.is_attempt else ()
        reader.give_up()
        fences = format.fences if types else ()
        markers = (*format.begin, *format.sections, *format.leads, *format.noise, *fences, *ends)
        marker = yield from reader.until(markers, reader.content)
        if marker is None:
            return reader.end()
        if marker in ends:
            reader.discard()
            yield from _echo(reader, format)
        elif marker in format.noise:
            reader.hold("", False)
        elif marker in fences:
            opening, brace, key = marker.partition("{")
            reader.unread(brace + key)
            reader.hold(opening, True)
            yield from _fenced_call(reader, format, types)
        elif marker in format.leads:
            reader.content(marker)
            yield from _bare_call(reader, format, types)
        elif marker in format.sections:
            reader.hold(marker, False)
            if found := (yield from reader.before((*format.begin, *format.sections), _LONGEST_HEADER)):
                reader.hold(found[0], False)  # a call follows, so it is not content
        else:
            bare = marker[-1] if marker[-1] in format.bare else ""
            reader.unread(bare)
            reader.hold(marker.removesuffix(bare), True)
            if format.body:
                yield from format.body(reader, format, types)


def _bare_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads a call that starts without a marker, if there is one."""
    reader.hold("", True)
    char = yield from reader.space()
    if char == "{" and format.fences and types:
        return (yield from _fenced_call(reader, format, types))
    if not char or char not in format.bare or not format.body:
        return
    if not (yield from reader.before((*format.begin, *format.sections), 0)):
        yield from format.body(reader, format, types)


def _fenced_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads consecutive JSON objects that are calls, and the end of their block."""
    yield from reader.space()
    while (yield from _json_call(reader, format, types)):
        reader.hold("", True)
        if (yield from reader.space()) != "{":
            if (yield from reader.literal("```")):
                reader.discard()
            return


def _echo(reader: Reader, format: ToolFormat) -> Steps[None]:
    """Skips the repeated text of a call."""
    if not format.echoes:
        return
    reader.hold("", True)
    if (yield from reader.space()) == "[":
        found = yield from reader.before((*format.begin, *format.end), _LONGEST_ECHO)
        if found and found[1] in format.end:
            yield from reader.literal(found[1])
            return reader.discard()
    reader.give_up()


def json_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads {"name": "f", "arguments": {...}}, or several of these, in a list or with ";", "," or white space between
    them; if the format has headers, also a header with the name and then the arguments. Calls without a marker are
    distinguished from other JSON by their keys."""
    char = yield from reader.space()
    if format.header and char not in ("[", "{"):
        if header := (yield from read_header(reader, format, "{")):
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


def _json_call(reader: Reader, format: ToolFormat, known: Types | None = None) -> Steps[bool]:
    """Reads an object that may be a call. Returns whether it is a complete call. known: if given, only objects that
    name one of these functions are calls."""
    return _JSONCall(reader, format, known).read()


class _JSONCall:
    """The state of reading an object that may be a call."""

    def __init__(self, reader: Reader, format: ToolFormat, known: Types | None) -> None:
        self._reader = reader
        self._format = format
        self._known = known
        self._is_bare = bool(format.bare) or known is not None
        self._name: Any = None
        self._early: list[str] = []  # arguments that precede the name
        self._num_calls = reader.num_calls

    def read(self) -> Steps[bool]:
        reader = self._reader
        format = self._format
        separator = "{"
        while (yield from reader.literal(separator)):
            key = yield from _json_key(reader)
            if key is None or not (format.names or _is_name(key)):
                return False
            if (say := self._sink(key)) is not None:
                is_complete = yield from _arguments(reader, say)
            elif key in format.names and not self._name:
                is_complete = yield from self._read_name()
            elif self._is_bare and key not in _OTHER_KEYS and not self._has_begun:
                reader.give_up()
                return (yield from reader.value(reader.content, depth=1)) and False  # no call inside it either
            else:
                is_complete = (yield from reader.whole_value())[1]
            if not is_complete:
                return False
            separator = ","
            if (yield from reader.space()) == "}":
                break
        if self._name and not self._has_begun and not self._is_bare and (yield from reader.space()) == "}":
            reader.call(self._name)
            reader.arguments("{}")
        return self._has_begun and (yield from reader.literal("}"))

    @property
    def _has_begun(self) -> bool:
        """Whether it is a call, which the reader has emitted."""
        return self._num_calls < self._reader.num_calls

    def _sink(self, key: str) -> Callable[[str], None] | None:
        """Return the receiver of an argument key's value, None for other keys. Starts the call if its name is known."""
        if not self._format.names:
            name = key
        elif key in self._format.arguments and not self._has_begun:
            name = self._name
        else:
            return None
        if not name:
            return self._early.append
        self._reader.call(name)
        return self._reader.arguments

    def _read_name(self) -> Steps[bool]:
        reader = self._reader
        self._name = parsed((yield from reader.whole_value())[0])
        is_complete = _is_name(self._name) and (self._known is None or self._name in self._known)
        if self._early and is_complete:
            reader.call(self._name)
            reader.arguments("".join(self._early))
        return is_complete


def _json_key(reader: Reader) -> Steps[str | None]:
    """Reads a key up to its value. Returns None if there is no key."""
    if (yield from reader.space()) != '"':
        return None
    key = parsed((yield from reader.whole_value())[0])
    yield from reader.space()
    if not isinstance(key, str) or not (yield from reader.literal(":")):
        return None
    yield from reader.space()
    return key


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and value != ""


def _arguments(reader: Reader, say: Callable[[str], None]) -> Steps[bool]:
    """Reads JSON arguments. An object is streamed; other values are read whole: null, or an object encoded as a JSON
    string."""
    if (yield from reader.space()) == "{":
        return (yield from reader.value(say))
    text, is_complete = yield from reader.whole_value()
    value = parsed(text) if is_complete else text
    if value is None or value == "":
        say("{}")
    else:
        say(without_surrogates(value) if isinstance(value, str) and isinstance(parsed(value), dict) else text)
    return is_complete


def tagged_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads a header with the name, and parameters between tags: <parameter=city>Paris</parameter>."""
    opening, key_ends, value_ends = format.parameter
    header = yield from read_header(reader, format, opening)
    if header is None:
        return
    reader.call(header["name"])
    properties = types.get(header["name"], {})
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
            if separator == "{" and key in format.wrappers and properties and key not in properties:
                marker = yield from _wrapped(reader, format, properties, key)
                if marker is None or not marker.endswith(opening):
                    return
            else:
                reader.arguments(f"{separator}{json_text(key)}: ")
                may_be_json = format.tells_strings and is_string != "true"
                allowed = properties.get(key, ALL_TYPES if may_be_json else STRING)
                if is_string == "true" and allowed == ALL_TYPES:
                    allowed = STRING
                marker = yield from _tagged_value(reader, allowed, value_ends, may_be_json)
            separator = ", "
        else:
            reader.content(marker)
            marker = ""


def _tagged_value(reader: Reader, types: frozenset[str], ends: tuple[str, ...], may_be_json: bool) -> Steps[str | None]:
    """Reads a value up to a marker, which is returned. Strings are streamed, other values are emitted whole.

    may_be_json: even a string may be written as JSON
    """
    pieces: list[str] = []
    is_string = types == STRING and not may_be_json
    reader.arguments('"' * is_string)
    marker = yield from reader.until(
        ends, (lambda text: reader.arguments(json_text(text)[1:-1])) if is_string else pieces.append
    )
    text = "".join(pieces)
    if marker:
        text = '"' if is_string else typed(text, types, may_be_json)
    reader.arguments(text)
    return marker


def _wrapped(
    reader: Reader, format: ToolFormat, properties: Mapping[str, frozenset[str]], key: str
) -> Steps[str | None]:
    """Reads the value of a parameter that may contain all arguments, up to the marker after it, which is returned. If
    it contains them, and no other parameter follows, they are the arguments."""
    opening, _, value_ends = format.parameter
    pieces: list[str] = []
    marker = yield from reader.until(value_ends, pieces.append)
    text = "".join(pieces)
    if marker and not marker.endswith((opening, *format.end)):
        marker = yield from reader.until((opening, *format.end), reader.content)
    has_more = marker is None or marker.endswith(opening)
    inner = None if has_more else parsed(text)
    if isinstance(inner, dict) and inner.keys() <= properties.keys():
        members = [
            f"{json_text(name)}: {typed(value if isinstance(value, str) else json_text(value), properties[name])}"
            for name, value in inner.items()
        ]
        reader.arguments("{" + ", ".join(members) + "}")
    else:
        reader.arguments(f"{{{json_text(key)}: {typed(text, ALL_TYPES, True)}" + ("" if has_more else "}"))
    return marker


def pythonic_calls(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads calls in Python: [f(city="Paris", days=2), g()]. Only calls with keywords and literals are accepted."""
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


def pythonic_block(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads calls in Python up to the end marker at once, and finds the ends of strings that contain unescaped quotes:
    [f(command='sed -n '1,9p' a.py')]."""
    if (yield from reader.rewrite(format.end, with_quotes_escaped)):
        yield from pythonic_calls(reader, format, types)


def _python_arguments(reader: Reader, name: str) -> Steps[bool]:
    """Reads keyword arguments up to ")". Returns whether they are complete."""
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
        if is_complete:
            text = from_python(text)
        elif text[:1] in ("'", '"'):
            text = json_text(text[1:])[:-1]
        reader.arguments(text)
        if not is_complete or ((yield from reader.space()) != ")" and not (yield from reader.literal(","))):
            return False
    if separator == "{":
        reader.call(name)
    reader.arguments("{}" if separator == "{" else "}")
    return (yield from reader.literal(")"))


def read_header(reader: Reader, format: ToolFormat, opening: str) -> Steps[re.Match[str] | None]:
    """Reads the text between a call's marker and its arguments."""
    found = yield from reader.before((opening, *format.end), _LONGEST_HEADER)
    return re.fullmatch(format.header, found[0].strip()) if found else None
