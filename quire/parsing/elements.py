"""Calls whose arguments are elements: <f><city>Paris</city><days><item>1</item><item>2</item></days></f>."""

from dataclasses import dataclass, field
from typing import Any

from quire.parsing.annotations import typed_value
from quire.parsing.calls import ToolFormat, Types, read_header
from quire.parsing.reader import Reader, Steps
from quire.parsing.values import ALL_TYPES, STRING, SchemaTypes, json_text, schema_types, typed

_LONGEST_TAG = 300  # characters
_DEEPEST = 64
_TEXT = "$text"  # the key of text next to elements


@dataclass
class _Element:
    name: str
    texts: list[str] = field(default_factory=list)  # before, between and after its elements
    elements: list["_Element"] = field(default_factory=list)


def element_call(reader: Reader, format: ToolFormat, types: Types) -> Steps[None]:
    """Reads a header with the name, and an element for each parameter. Nested elements are the items of a list or the
    properties of an object, according to the parameter's schema. format.parameter contains the beginnings of tags."""
    opening, [closing], _ = format.parameter
    header = yield from read_header(reader, format, opening)
    if header is None:
        return
    reader.call(header["name"])
    parameters = types.get(header["name"], {})
    separator = "{"
    name = ""
    values: list[str] = []  # of the elements of this name: JSON
    while (marker := (yield from reader.until((opening, *format.end), reader.content))) == opening:
        tag = yield from _tag(reader)
        if tag is None or tag.startswith("/"):
            break
        if tag != name:
            separator = _flush(reader, separator, name, values)
        name = tag
        allowed = parameters.get(name)
        if allowed == STRING and not values:
            reader.arguments(f"{separator}{json_text(name)}: ")
            separator = ", "
            if not (yield from typed_value(reader, STRING, (f"{closing}{name}>",))):
                break
        else:
            element = yield from _element(reader, name, opening, closing)
            if element is None:
                break
            values.append(_json(element, allowed.schema if isinstance(allowed, SchemaTypes) else None))
    separator = _flush(reader, separator, name, values)
    if marker in format.end:
        reader.arguments("{}" if separator == "{" else "}")


def _flush(reader: Reader, separator: str, name: str, values: list[str]) -> str:
    """Emits the values of a name, if there are any, and clears them. Returns the separator before the next name."""
    if not values:
        return separator
    reader.arguments(f"{separator}{json_text(name)}: {_one_or_list(values)}")
    values.clear()
    return ", "


def _element(reader: Reader, name: str, opening: str, closing: str) -> Steps[_Element | None]:
    """Reads an element after its opening tag. Returns None if it is not closed properly, or nested too deeply."""
    path = [_Element(name)]
    while marker := (yield from reader.until((opening, closing), path[-1].texts.append)):
        tag = yield from _tag(reader)
        if tag is None or len(path) > _DEEPEST:
            return None
        if marker == opening:
            path.append(_Element(tag))
        elif tag != path[-1].name:
            return None
        else:
            element = path.pop()
            if not path:
                return element
            path[-1].elements.append(element)
    return None


def _tag(reader: Reader) -> Steps[str | None]:
    """Reads the name of a tag, up to its end."""
    found = yield from reader.before((">",), _LONGEST_TAG)
    return found[0] if found and (yield from reader.literal(">")) else None


def _json(element: _Element, schema: Any) -> str:
    """Return the value of an element: text by its types, nested elements as a list if the schema requires it, or else
    as an object."""
    text = "".join(element.texts)
    kind, schema_of_parts = _container(schema)
    if not element.elements:
        types = schema_types(schema)
        if kind and "string" not in types and not text.strip():
            return "[]" if kind == "array" else "{}"
        return typed(text, types) if isinstance(schema, dict) else json_text(text)
    if kind == "array":
        return "[" + ", ".join(_json(item, schema_of_parts.get("items")) for item in element.elements) + "]"
    properties = schema_of_parts.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    values: dict[str, list[str]] = {}
    for part in element.elements:
        values.setdefault(part.name, []).append(_json(part, properties.get(part.name)))
    if text.strip():
        values.setdefault(_TEXT, []).append(json_text(text))
    return "{" + ", ".join(f"{json_text(name)}: {_one_or_list(found)}" for name, found in values.items()) + "}"


def _container(schema: Any) -> tuple[str, dict[str, Any]]:
    """Return ("array" or "object", the schema or its alternative that allows it), or ("", {})."""
    if not isinstance(schema, dict):
        return "", {}
    options = [option for key in ("anyOf", "oneOf", "allOf") for option in _list(schema.get(key))]
    for option in [*options, schema]:
        types = schema_types(option)
        for kind in ("array", "object"):
            if kind in types and types != ALL_TYPES:
                return kind, option
    return "", {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _one_or_list(values: list[str]) -> str:
    return values[0] if len(values) == 1 else "[" + ", ".join(values) + "]"
