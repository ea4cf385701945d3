"""Narrows the unspecified parts of a JSON schema to the most likely intention, so that generated texts end. Every
change allows fewer documents, and none that the schema does not allow:

    {"properties": {"a": A}}    →  an object with no property besides a
    {"prefixItems": [A, B]}     →  an array with no items besides these two
    {"minimum": 3}              →  a number, of at most 15 digits before and after the point
    {}                          →  any value of a limited size
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from quire.structured.references import KEYWORDS, Schema, UnsupportedError
from quire.structured.schema import TYPES, types_of

_LIMITS = {kind: set(keywords) for kind, keywords in KEYWORDS["limits"].items()}
_MAX_STEPS = 2_000  # branches of all values, in all combinations
_LARGEST = 10**15  # JSON parsers preserve numbers of 15 digits exactly
_LARGEST_INTEGER = 10**18
_SMALLEST = 1e-10
_PLAIN = {
    "type": ["null", "boolean", "number", "string"],
    "maxLength": 60,
    "minimum": -_LARGEST,
    "maximum": _LARGEST,
    "multipleOf": _SMALLEST,
}
_ANY = {
    **_PLAIN,
    "type": list(TYPES),
    "items": _PLAIN,
    "maxItems": 4,
    "additionalProperties": _PLAIN,
    "maxProperties": 4,
}

Part = dict[str, Any]  # a schema without allOf, anyOf and $ref


def narrowed(schema: dict[str, Any]) -> Schema:
    """Return a rewritten schema that allows some of the documents of `schema`; none in rare cases.

    Raises UnsupportedError if the schema has too many combinations of branches.
    """
    return _Narrowing(schema).document()


class _Narrowing:
    def __init__(self, root: dict[str, Any]) -> None:
        self._sources: dict[str, Schema] = root.get("$defs", {})
        self._root = {keyword: value for keyword, value in root.items() if keyword != "$defs"}
        self._definitions: dict[str, Schema] = {}
        self._pending: list[str] = []
        self._inlined: list[str] = []  # definitions that contain the current value, or are parts of it
        self._count = 0

    def document(self) -> Schema:
        root = self._value(self._root)
        while self._pending:
            name = self._pending.pop()
            self._definitions[f"{name}n"] = self._value(self._sources[name])
        definitions = {**self._sources, **self._definitions}
        return {**root, "$defs": definitions} if definitions and isinstance(root, dict) else root

    def _value(self, schema: Schema) -> Schema:
        """Return the schema of a whole value: of the document, a property or an item."""
        if isinstance(schema, dict) and schema.keys() == {"anyOf"}:
            return {"anyOf": [self._value(branch) for branch in schema["anyOf"]]}
        if isinstance(schema, dict) and schema.keys() == {"$ref"}:
            name = _name(schema)
            if f"{name}n" not in self._definitions:
                self._definitions[f"{name}n"] = True  # until it is narrowed
                self._pending.append(name)
            return {"$ref": f"#/$defs/{name}n"}
        count = len(self._inlined)
        choices = [self._conjunction(parts) for parts in list(self._ways(schema))]
        del self._inlined[count:]
        if len(choices) > 1:
            return {"anyOf": choices}
        return choices[0] if choices else schema

    def _ways(self, schema: Schema) -> Iterator[list[Part]]:
        """Return the combinations of a value's branches: each a list of parts that apply together."""
        if isinstance(schema, bool):
            yield from [[]] if schema else []
            return
        part = dict(schema)
        choices: list[list[Schema]] = [[item] for item in part.pop("allOf", [])]
        choices += [part.pop("anyOf")] if "anyOf" in part else []
        if "$ref" in part and _name(part) not in self._inlined:
            self._inlined.append(_name(part))
            choices.append([self._sources[_name(part)]])
            del part["$ref"]
        own = [part] if part else []
        for found in product(*([way for item in choice for way in self._ways(item)] for choice in choices)):
            self._count += 1
            if self._count > _MAX_STEPS:
                raise UnsupportedError("the schema has too many combinations of branches")
            yield [*own, *(part for way in found for part in way)]

    def _conjunction(self, parts: list[Part]) -> Schema:
        """Return the schema of a value to which all parts apply."""
        given = {keyword for part in parts for keyword in part}
        if not parts or given & {"enum", "const", "$ref"}:
            return _all(parts) if parts else _ANY
        kinds = set.intersection(*map(types_of, parts))
        limits: dict[str, Any] = {}
        is_open = kinds >= {"object", "array", "string"}
        if is_open:
            kinds_said = {name for name in kinds if given & _LIMITS.get(name, set())}
            if not kinds_said:
                return {**_ANY, "type": sorted(kinds)}
            limits["type"], kinds = sorted(kinds_said), kinds_said
        if "object" in kinds and (is_open or given & _LIMITS["object"]):
            limits |= self._object(parts, given)
        if "array" in kinds and (is_open or given & _LIMITS["array"]):
            limits |= self._array(parts, given)
        if "number" in kinds:
            limits |= _number(parts, given)
        return {**parts[0], **limits} if len(parts) == 1 else _all([*parts, limits])

    def _all(self, schemas: list[Schema]) -> Schema:
        return self._value(_all(schemas))

    def _object(self, parts: list[Part], given: set[str]) -> dict[str, Any]:
        """Limit an object to the properties that are listed or required."""
        names = _union(parts, "properties", "required")
        patterns = _union(parts, "patternProperties")
        listed = {name: self._all([_property(part, name) for part in parts]) for name in names}
        limits: dict[str, Any] = {"properties": listed} if listed else {}
        if patterns:
            limits["patternProperties"] = {
                pattern: self._all([part.get("patternProperties", {}).get(pattern, True) for part in parts])
                for pattern in patterns
            }
        is_complete = patterns or any(schema is not False for schema in listed.values())
        is_closed = is_complete and not given & {"additionalProperties", "minProperties"}
        others = [part.get("additionalProperties", True) for part in parts]
        return {**limits, "additionalProperties": False if is_closed else self._all(others)}

    def _array(self, parts: list[Part], given: set[str]) -> dict[str, Any]:
        """Limit an array to the items that are listed or required."""
        length = max(len(part.get("prefixItems", ())) for part in parts)
        lists = [[*part.get("prefixItems", ()), *[part.get("items", True)] * (length + 1)] for part in parts]
        first = [self._all([items[index] for items in lists]) for index in range(length)]
        is_closed = first and "items" not in given and all(part.get("minItems", 0) <= length for part in parts)
        limits: dict[str, Any] = {"prefixItems": first} if first else {}
        return {**limits, "items": False if is_closed else self._all([part.get("items", True) for part in parts])}


def _number(parts: list[Part], given: set[str]) -> dict[str, Any]:
    """Limit a number to the digits that JSON parsers preserve. A number without limits may have an exponent."""
    is_integer = any("integer" in part.get("type", ()) for part in parts)
    if not is_integer and not given & _LIMITS["number"]:
        return {}
    largest = _LARGEST_INTEGER if is_integer else _LARGEST
    lower = {"minimum", "exclusiveMinimum"}
    upper = {"maximum", "exclusiveMaximum"}
    if any(abs(part[keyword]) > largest for part in parts for keyword in (lower | upper) & part.keys()):
        return {}
    limits: dict[str, Any] = {} if given & lower else {"minimum": -largest}
    limits |= {} if given & upper else {"maximum": largest}
    return limits if is_integer or "multipleOf" in given else {**limits, "multipleOf": _SMALLEST}


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).removeprefix("#/$defs/")


def _union(parts: list[Part], *keywords: str) -> list[str]:
    """Return the names that the parts list under the keywords, in order."""
    return list(dict.fromkeys(name for part in parts for keyword in keywords for name in part.get(keyword, ())))


def _property(part: Part, name: str) -> Schema:
    """Return a part's schema for the property of a name."""
    others: Schema = part.get("additionalProperties", True) if "patternProperties" not in part else True
    found: Schema = part.get("properties", {}).get(name, others)
    return found


def _all(schemas: list[Any]) -> Schema:
    schemas = [schema for schema in schemas if schema is not True and schema != {}]
    if False in schemas:
        return False
    return {"allOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else True
