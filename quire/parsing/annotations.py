"""Calls between tags whose parameters have attributes besides the name: <argument key="days"
type="number">3</argument>."""

import re

from quire.parsing.calls import ToolFormat, Types, json_calls, read_header
from quire.parsing.reader import Reader, Steps
from quire.parsing.values import ALL_TYPES, STRING, in_json, json_text, typed

_LONGEST_HEADER = 300  # characters
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&amp;": "&"}
_ENTITY = re.compile("|".join(_ENTITIES))
_CDATA = "<![CDATA["


def json_or_annotated_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads JSON or parameters between tags, whichever the model wrote."""
    body = json_calls if (yield from reader.space()) in ("{", "[") else annotated_call
    yield from body(reader, format, types)


def annotated_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads a header with the name, and parameters between tags. Values without a type in the function's schema are
    read by the type that the model writes."""
    opening, key_ends, value_ends = format.parameter
    header = yield from read_header(reader, format, opening)
    if header is None:
        return
    reader.call(header["name"])
    parameters = types.get(header["name"], {})
    separator = "{"
    while (marker := (yield from reader.until((opening, *format.end), reader.content))) == opening:
        found = yield from reader.before(key_ends, _LONGEST_HEADER)
        if found is None:
            reader.content(opening)
            continue
        yield from reader.literal(found[1])
        key, declared = _key(found[0], format.key)
        reader.arguments(f"{separator}{json_text(key)}: ")
        separator = ", "
        is_cdata = found[1].endswith(_CDATA)
        ends = tuple(f"]]>{end}" for end in value_ends) if is_cdata else value_ends
        entities = tuple(_ENTITIES) if format.is_escaped and not is_cdata else ()
        if not (yield from typed_value(reader, parameters.get(key, declared), ends, entities)):
            return
    if marker:
        reader.arguments("{}" if separator == "{" else "}")


def _key(text: str, pattern: str) -> tuple[str, frozenset[str]]:
    """Return (name of a parameter, the types of its value: the one that the model wrote, or else string)."""
    found = re.match(pattern, text)
    groups = found.groupdict() if found else {}
    name = _ENTITY.sub(lambda entity: _ENTITIES[entity[0]], groups.get("name") or "")
    return name, ALL_TYPES.intersection({groups.get("type")}) or STRING


def typed_value(
    reader: Reader, types: frozenset[str], ends: tuple[str, ...], entities: tuple[str, ...] = ()
) -> Steps[bool]:
    """Reads a value up to its end. Returns whether it is complete. Strings are streamed, other values are emitted
    whole. entities: the XML entities that are decoded in it
    """
    pieces: list[str] = []
    is_string = types == STRING
    reader.arguments('"' * is_string)

    def say(text: str) -> None:
        if is_string:
            reader.arguments(in_json(text))
        else:
            pieces.append(text)

    while (marker := (yield from reader.until((*ends, *entities), say))) in entities:
        say(_ENTITIES[marker])
    text = "".join(pieces)
    if marker:
        text = '"' if is_string else typed(text, types)
    reader.arguments(text)
    return marker is not None
