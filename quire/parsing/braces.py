"""Calls with a special notation for arguments: f{city:<escape>Paris<escape>,days:3,on:{hours:[1,2]}}."""

import re

from quire.parsing.annotations import typed_value
from quire.parsing.calls import ToolFormat, Types
from quire.parsing.reader import Reader, Steps
from quire.parsing.values import ALL_TYPES, STRING, json_text, typed

_LONGEST_HEADER = 300  # characters of names, keys and words
_CLOSERS = {"{": "}", "(": ")", "[": "]"}
_JSON = {"(": "{", ")": "}"}


def braced_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads a header with the name, and an object with unquoted keys and format.quote around strings."""
    name = yield from _begin(reader, format)
    if name is None:
        return
    parameters = types.get(name, {})
    closers = ""  # of the open objects and lists
    separator = ""
    while (char := (yield from reader.space())) and not (yield from reader.before(format.end, 0)):
        if closers and char == ",":
            yield from reader.literal(char)
        elif closers.endswith(char):
            yield from reader.literal(char)
            reader.arguments(_JSON.get(char, char))
            closers = closers[:-1]
            separator = ", "
            if not closers:
                return
        elif char in ")]}":
            return  # it does not match the open bracket
        else:
            has_key = closers[-1:] in ("}", ")")
            key = (yield from _key(reader, format)) if has_key else ""
            if key is None:
                return
            reader.arguments(f"{separator}{json_text(key)}: " if has_key else separator)
            separator = ", "
            char = yield from reader.space()
            if char and char in _CLOSERS:
                yield from reader.literal(char)
                reader.arguments(_JSON.get(char, char))
                closers += _CLOSERS[char]
                separator = ""
            else:
                allowed = parameters.get(key, ALL_TYPES) if has_key and len(closers) == 1 else ALL_TYPES
                if not (yield from _value(reader, format, closers[-1], allowed)):
                    return


def _begin(reader: Reader, format: ToolFormat) -> Steps[str | None]:
    """Reads the header, and starts the call. Returns its name, None if no arguments follow."""
    found = yield from reader.before(("{", "(", *format.end), _LONGEST_HEADER)
    header = re.fullmatch(format.header, found[0].strip()) if found else None
    if header is None:
        return None
    reader.call(header["name"])
    if (yield from reader.space()) in _CLOSERS:
        return header["name"]
    reader.arguments("{}")
    return None


def _key(reader: Reader, format: ToolFormat) -> Steps[str | None]:
    found = yield from reader.before((":", *format.end), _LONGEST_HEADER)
    if found is None or not (yield from reader.literal(":")):
        return None
    return found[0].strip().removeprefix(format.quote).removesuffix(format.quote)


def _value(reader: Reader, format: ToolFormat, closer: str, types: frozenset[str]) -> Steps[bool]:
    """Reads a string or a word. Returns whether it is complete. A string is streamed, unless the schema requires
    another type."""
    if (yield from reader.literal(format.quote)):
        return (yield from typed_value(reader, STRING if "string" in types else types, (format.quote,)))
    found = yield from reader.before((",", "}", "]", closer, *format.end), _LONGEST_HEADER)
    if found is None:
        yield from reader.until(format.end, reader.arguments)
        return False
    reader.arguments(typed(found[0].strip(), types))
    return True
