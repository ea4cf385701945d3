"""Rejects JSON schemas with keywords that a back end would ignore."""

from typing import Any

from quire.structured.references import KEYWORDS, Schema, UnsupportedError

_ALONE = ("$ref", "anyOf", "enum", "const")  # keywords next to which these back ends ignore others


def check_keywords(schema: Schema, backend: str) -> None:
    """Raises UnsupportedError unless a back end enforces every keyword of a rewritten schema."""
    if isinstance(schema, bool):
        raise UnsupportedError(f"the back end {backend} needs a schema with a type, not true or false")
    given = schema.keys() - {"$defs"}
    alone = [keyword for keyword in _ALONE if keyword in given]
    kind = schema.get("type")
    known = {"type", *KEYWORDS[backend].get(kind, ())} if isinstance(kind, str) else set()
    if alone and given == {"type", alone[0]} and alone[0] in ("enum", "const"):
        values = schema.get("enum", [schema.get("const")])
        names = {"string": str, "boolean": bool, "null": type(None)}
        known = given if isinstance(kind, str) and all(type(value) is names.get(kind) for value in values) else known
    elif alone:
        known = {alone[0]}
    if unknown := sorted(given - known):
        raise UnsupportedError(
            f"the back end {backend} does not support {', '.join(map(repr, unknown))} "
            f"{'beside ' + alone[0] if alone else 'of the type ' + str(kind)}"
        )
    if not given:
        raise UnsupportedError(f"the back end {backend} needs a type in each schema")
    if "pattern" in given and given & {"minLength", "maxLength"}:
        raise UnsupportedError(f"the back end {backend} does not support lengths beside 'pattern'")
    parts: list[Any] = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
    parts += [*schema.get("anyOf", ()), *schema.get("prefixItems", ())]
    parts += [schema["items"]] if schema.get("items", True) not in (True, False) else []
    extra = schema.get("additionalProperties", False)
    if extra is not False:
        parts.append(extra)
    for part in parts:
        check_keywords(part, backend)
