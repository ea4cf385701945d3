"""References of a JSON schema ($ref, $dynamicRef, $id, $anchor), resolved to names of definitions."""

import json
import tomllib
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

MAX_SCHEMAS = 5_000  # subschemas; a schema that a person writes has a few hundred at most
MAX_DEPTH = 50  # levels of subschemas

KEYWORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("keywords.toml").read_text(encoding="utf-8"))
_SINGLE, _LISTS, _MAPS, _COUNTS, _OTHER, _FOREIGN = (keywords.split() for keywords in KEYWORDS["kinds"].values())
_SUBSCHEMAS = {*_SINGLE, *_LISTS, *_MAPS}

Schema = dict[str, Any] | bool


class UnsupportedError(ValueError):
    """A schema that cannot be converted to a grammar."""


def _check_value(keyword: str, value: Any) -> None:
    """Raises ValueError unless the value of a keyword has the type that it must have."""
    holds, words = _VALUES.get(keyword, (lambda value: True, ""))
    if not holds(value):
        raise ValueError(f"the keyword {keyword!r} must be {words}, got {json.dumps(value):.80}")


def _check_may_be_ignored(keyword: str, value: Any) -> None:
    """Raises UnsupportedError for an unsupported keyword that affects validity."""
    if keyword in _FOREIGN:
        raise UnsupportedError(f"the keyword {keyword!r} is not supported")
    if keyword == "$schema" and "json-schema.org" not in str(value):
        raise UnsupportedError(f"the dialect {value!r:.80} is not supported")


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and isfinite(value))


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_types(value: Any) -> bool:
    return value in _TYPES if isinstance(value, str) else _are_names(value) and all(map(_are_types, value))


def _are_dependencies(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_are_names, value.values()))


_TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "number": (_is_number, "a number"),
    "names": (_are_names, "a list of strings"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "text": (lambda value: isinstance(value, str), "a string"),
    "list": (lambda value: isinstance(value, list), "a list"),
}
_VALUES = {
    **{name: _CHECKS[kind] for kind, names in KEYWORDS["values"].items() for name in names.split()},
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number of at least 0")),
    "type": (_are_types, f"a type or a list of types ({', '.join(_TYPES)})"),
    "dependentRequired": (_are_dependencies, "an object of lists of strings"),
}


class References:
    """A schema whose references are resolved: `root`, and `definitions` by the names in its "$ref"s. Only keywords that
    affect validity are kept. Raises UnsupportedError or ValueError.
    """

    def __init__(self, document: Schema) -> None:
        self.definitions: dict[str, Schema] = {}
        self._resources: dict[str, Any] = {}  # URI → schema
        self._anchors: dict[str, tuple[Any, str]] = {}  # URI#name → schema, and the URI of its resource
        self._dynamic: set[str] = set()  # URI#name of each $dynamicAnchor
        self._names: dict[tuple[int, tuple[str, ...]], str] = {}
        self._pending: list[tuple[str, Any, str, tuple[str, ...]]] = []
        self._count = 0
        self._resources[""] = document
        self._index(document, "", 0)
        self.root = self._convert(document, "", ("",), 0)
        while self._pending:
            name, schema, resource, scope = self._pending.pop()
            self.definitions[name] = self._convert(schema, resource, scope, 0)

    def _index(self, schema: Any, base: str, depth: int) -> None:
        """Find the identifiers of a schema and its subschemas."""
        if depth > MAX_DEPTH:
            raise UnsupportedError(f"the schema is nested too deeply: at most {MAX_DEPTH} levels are supported")
        if not isinstance(schema, dict):
            return
        base = self._register(schema, base)
        for keyword, value in schema.items():
            if keyword in _SINGLE:
                self._index(value, base, depth + 1)
            elif keyword in _LISTS and isinstance(value, list):
                for item in value:
                    self._index(item, base, depth + 1)
            elif (keyword in _MAPS or keyword in ("$defs", "definitions")) and isinstance(value, dict):
                for item in value.values():
                    self._index(item, base, depth + 1)

    def _register(self, schema: dict[str, Any], base: str) -> str:
        """Record a schema's own identifiers. Returns the URI of its resource."""
        if isinstance(identifier := schema.get("$id"), str):
            base = urldefrag(urljoin(base, identifier)).url
            self._resources[base] = schema
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._anchors[f"{base}#{anchor}"] = (schema, base)
                if keyword == "$dynamicAnchor":
                    self._dynamic.add(f"{base}#{anchor}")
        return base

    def _convert(self, schema: Any, base: str, scope: tuple[str, ...], depth: int) -> Schema:
        """Return a schema with names instead of references. scope: the URIs of the resources that contain it, outermost
        first."""
        self._count_subschema(depth)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"a schema must be an object, true or false, not {schema!r:.80}")
        if isinstance(identifier := schema.get("$id"), str):
            base = urldefrag(urljoin(base, identifier)).url
            scope = scope if base in scope else (*scope, base)
        result: dict[str, Any] = {}
        references: list[Schema] = []
        for keyword, value in schema.items():
            if keyword in ("$ref", "$dynamicRef"):
                references.append({"$ref": self._name(str(value), keyword, base, scope)})
            elif keyword in _SUBSCHEMAS:
                result[keyword] = self._convert_all(keyword, value, base, scope, depth + 1)
            elif keyword in _COUNTS or keyword in _OTHER:
                _check_value(keyword, value)
                result[keyword] = int(value) if keyword in _COUNTS else value
            else:
                _check_may_be_ignored(keyword, value)
        if references and not result and len(references) == 1:
            return references[0]
        if references:
            result["allOf"] = [*result.get("allOf", []), *references]
        return result

    def _count_subschema(self, depth: int) -> None:
        self._count += 1
        if self._count > MAX_SCHEMAS or depth > MAX_DEPTH:
            message = f"the schema is too large: at most {MAX_SCHEMAS} subschemas and {MAX_DEPTH} levels are supported"
            raise UnsupportedError(message)

    def _convert_all(self, keyword: str, value: Any, base: str, scope: tuple[str, ...], depth: int) -> Any:
        """Return the value of a keyword that consists of subschemas."""
        if keyword in _SINGLE:
            return self._convert(value, base, scope, depth)
        if keyword in _LISTS:
            if not isinstance(value, list):
                raise ValueError(f"{keyword} must be a list of schemas")
            return [self._convert(item, base, scope, depth) for item in value]
        if not isinstance(value, dict):
            raise ValueError(f"{keyword} must be an object of schemas")
        return {name: self._convert(item, base, scope, depth) for name, item in value.items()}

    def _name(self, reference: str, keyword: str, base: str, scope: tuple[str, ...]) -> str:
        """Return the name of the definition to which a reference points."""
        uri = urljoin(base, reference) if reference != "#" else f"{base}#"
        fragment = urldefrag(uri).fragment
        if keyword == "$dynamicRef" and uri in self._dynamic:
            outermost = next((one for one in scope if f"{one}#{fragment}" in self._dynamic), base)
            uri = f"{outermost}#{fragment}"
        schema, resource = self._find(uri, reference)
        scope = scope if resource in scope else (*scope, resource)
        key = (id(schema), scope if self._dynamic else ())
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._pending.append((self._names[key], schema, resource, scope))
        return self._names[key]

    def _find(self, uri: str, reference: str) -> tuple[Any, str]:
        """Return the schema at a URI, and the URI of the resource that contains it."""
        if uri in self._anchors:
            return self._anchors[uri]
        resource, fragment = urldefrag(uri)
        schema: Any = self._resources.get(resource)
        if schema is None or (fragment and not fragment.startswith("/")):
            raise UnsupportedError(f"the reference {reference!r:.80} leads nowhere; schemas are not downloaded")
        for part in unquote(fragment).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                schema = schema[int(part) if isinstance(schema, list) else part]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise ValueError(f"the reference {reference!r:.80} leads nowhere") from error
            if isinstance(schema, dict) and isinstance(identifier := schema.get("$id"), str):
                resource = urldefrag(urljoin(resource, identifier)).url
        return schema, resource
