"""Rewrites a JSON schema to the keywords that grammars are made from.

A grammar need not allow every document that is valid for the schema; every document that it allows must be valid. So a
keyword that libraries do not support is replaced by a stricter constraint in supported keywords:

    {"contains": S}                    →  the first item of the array matches S
    {"not": {"required": ["a"]}}       →  an object without a
    {"if": A, "then": B, "else": C}    →  A and B, or not A and C
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from typing import Any

from quire.messages.errors import error_text
from quire.structured.references import KEYWORDS, References, Schema, UnsupportedError

TYPES = ("null", "boolean", "object", "array", "number", "string")
_MAX_ALTERNATIVES = 64  # combinations of evaluated properties
_MAX_CONTAINED = 100
_MAX_PROPERTIES = 400  # of an object; the parser tracks all properties that may follow
_MAX_ALL = 8  # patterns that a text must match at once; they are combined to a product automaton

_KNOWN = KEYWORDS["known"]["keywords"].split()
_FORMATS: dict[str, dict[str, Any]] = KEYWORDS["formats"]


def rewritten(schema: Schema, *, closed: bool = False) -> dict[str, Any]:
    """Rewrite a JSON schema to supported keywords. Raises ValueError for an invalid or unsupported schema. closed:
    objects have only properties that the schema lists.
    """
    try:
        return _Rewriting(schema, closed).document()
    except RecursionError as error:
        raise UnsupportedError("the schema is nested too deeply") from error


class _Rewriting:
    def __init__(self, document: Schema, closed: bool) -> None:
        references = References(document)
        self._root = references.root
        self._sources = references.definitions
        self._closed = closed
        self._definitions: dict[str, Schema] = {}
        self._pending: list[str] = []
        self._negating: list[str] = []  # definitions that are being negated
        self._count = 0

    def document(self) -> dict[str, Any]:
        root = self._schema(self._root)
        while self._pending:
            name = self._pending.pop()
            self._definitions[name] = self._schema(self._sources[name])
        if isinstance(root, bool):
            if not root:
                raise UnsupportedError("no document is valid for the schema")
            return {}
        return {**root, "$defs": self._definitions} if self._definitions else root

    def _schema(self, schema: Schema) -> Schema:
        """Return a schema in supported keywords that allows no document that the original does not allow."""
        self._count += 1
        if self._count > 20_000:
            raise UnsupportedError("the schema is too complex")
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
            return self._schema({"$any": list(self._evaluated(schema))})
        result = {keyword: schema[keyword] for keyword in _KNOWN if keyword in schema}
        extra: list[Schema] = []  # schemas that must also match
        if isinstance(name := result.pop("format", None), str):
            stricter = _FORMATS.get(name, {"format": name})
            extra += [stricter] if stricter.keys() & {"pattern"} and "pattern" in result else []
            result = {**stricter, **result}
        result |= self._members(schema)
        for keyword, rewrite in _REWRITES.items():
            if keyword in schema:
                extra += rewrite(self, schema)
        extra += schema.get("allOf", [])
        if "propertyNames" in schema:
            _restrict_names(result, self._names(schema["propertyNames"]))
        if "anyOf" in schema:
            result["anyOf"] = [self._schema(item) for item in schema["anyOf"]]
        return self._all(result, extra, [schema["$any"]] if "$any" in schema else [])

    def _reference(self, name: str) -> Schema:
        if name not in self._definitions:
            self._definitions[name] = True  # until it is rewritten
            self._pending.append(name)
        return {"$ref": f"#/$defs/{name}"}

    def _members(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords for the properties of an object and the items of an array."""
        result: dict[str, Any] = {}
        for keyword in ("properties", "patternProperties"):
            if len(schema.get(keyword, ())) > _MAX_PROPERTIES:
                raise UnsupportedError(f"an object has too many properties: at most {_MAX_PROPERTIES} are supported")
            if keyword in schema:
                result[keyword] = {name: self._schema(value) for name, value in schema[keyword].items()}
        for keyword in ("additionalProperties", "items"):
            if keyword in schema:
                result[keyword] = self._schema(schema[keyword])
        if self._closed and "properties" in schema:
            result.setdefault("additionalProperties", False)
        if "prefixItems" in schema:
            result["prefixItems"] = [self._schema(item) for item in schema["prefixItems"]]
        return result

    def _all(self, result: dict[str, Any], extra: list[Schema], alternatives: list[list[Schema]]) -> Schema:
        """Combine a rewritten schema with further schemas, and one of each list of alternatives."""
        alternatives = [item["$any"] for item in extra if isinstance(item, dict) and "$any" in item] + alternatives
        conjuncts = [self._schema(item) for item in extra if not (isinstance(item, dict) and "$any" in item)]
        conjuncts += [self._any(choices) for choices in alternatives]
        if False in conjuncts:
            return False
        if sum(isinstance(item, dict) and "pattern" in item for item in conjuncts) > _MAX_ALL:
            raise UnsupportedError(f"at most {_MAX_ALL} patterns in allOf are supported")
        conjuncts = [item for item in conjuncts if item is not True]
        if not result and len(conjuncts) == 1:
            return conjuncts[0]
        return {**result, "allOf": conjuncts} if conjuncts else result

    def _any(self, choices: list[Schema]) -> Schema:
        """Return a schema that matches one of several schemas of this module. Choices that cannot be rewritten are
        dropped."""
        found: list[Schema] = []
        reason = None
        for choice in choices:
            pending = list(self._pending)
            definitions = dict(self._definitions)
            try:
                result = self._schema(choice)
            except UnsupportedError as error:
                self._pending = pending
                self._definitions = definitions
                reason = error
                continue
            if result is True:
                return True
            if result is not False and result not in found:
                found.append(result)
        if not found and reason is not None:
            raise reason
        return found[0] if len(found) == 1 else {"anyOf": found} if found else False

    # ---- keywords that are replaced by others

    def _conditional(self, schema: dict[str, Any]) -> list[Schema]:
        condition = schema["if"]
        then = schema.get("then", True)
        otherwise = schema.get("else", True)
        if then is True and otherwise is True:
            return []
        return [{"$any": [{"allOf": [condition, then]}, {"allOf": [{"not": condition}, otherwise]}]}]

    def _dependent_required(self, schema: dict[str, Any]) -> list[Schema]:
        return [
            {"$any": [_without(name), {"required": [name, *others]}]}
            for name, others in schema["dependentRequired"].items()
            if others
        ]

    def _dependent_schemas(self, schema: dict[str, Any]) -> list[Schema]:
        return [
            {"$any": [_without(name), {"required": [name], "allOf": [dependent]}]}
            for name, dependent in schema["dependentSchemas"].items()
        ]

    def _contains(self, schema: dict[str, Any]) -> list[Schema]:
        contained = schema["contains"]
        least = schema.get("minContains", 1)
        most = schema.get("maxContains")
        if most is not None:
            if least > most:
                return [{"type": [name for name in TYPES if name != "array"]}]
            return [{"items": contained, "minItems": least, "maxItems": most}]
        if least > _MAX_CONTAINED:
            raise UnsupportedError(f"minContains must be at most {_MAX_CONTAINED}")
        return [{"prefixItems": [contained] * least, "minItems": least}] if least else []

    def _one_of(self, schema: dict[str, Any]) -> list[Schema]:
        choices = list(self._exactly_one(schema["oneOf"]))
        # A choice that cannot be rewritten is dropped only if the others constrain more than the schema itself.
        return [{"$any" if any(len(choice["allOf"]) > 1 for choice in choices) else "anyOf": choices}]

    def _exactly_one(self, schemas: list[Schema]) -> Iterator[dict[str, Any]]:
        for index, schema in enumerate(schemas):
            others = schemas[:index] + schemas[index + 1 :]
            yield {"allOf": [schema, *({"not": other} for other in others if not self._exclude(schema, other))]}

    def _exclude(self, first: Schema, second: Schema, depth: int = 0) -> bool:
        """Whether a simple check shows that no document is valid for both schemas."""
        first = self._resolved(first)
        second = self._resolved(second)
        if isinstance(first, bool) or isinstance(second, bool) or depth > 5:
            return first is False or second is False
        if not types_of(first) & types_of(second):
            return True
        values = [_values(first), _values(second)]
        if None not in values and not any(_equal(a, b) for a, b in product(*filter(None, values))):
            return True
        if types_of(first) != {"object"} or types_of(second) != {"object"}:
            return False
        properties = first.get("properties", {}), second.get("properties", {})
        shared = (
            set(first.get("required", ())) & set(second.get("required", ())) & set(properties[0]) & set(properties[1])
        )
        return any(self._exclude(properties[0][name], properties[1][name], depth + 1) for name in shared)

    def _resolved(self, schema: Schema) -> Schema:
        for _ in range(10):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._sources[schema["$ref"]]
        return schema

    def _unique_items(self, schema: dict[str, Any]) -> list[Schema]:
        if not schema["uniqueItems"] or schema.get("maxItems", 2) <= 1:
            return []
        raise UnsupportedError("uniqueItems is not supported for arrays of more than one item")

    def _not(self, schema: dict[str, Any]) -> list[Schema]:
        return [self._negated(schema["not"])]

    def _negated(self, schema: Schema) -> Schema:
        """Return a schema that allows only documents that `schema` does not allow."""
        if isinstance(schema, bool):
            return not schema
        if "$ref" in schema:
            name = schema["$ref"]
            if name in self._negating:
                raise UnsupportedError("'not' of a recursive schema is not supported")
            self._negating.append(name)
            try:
                return self._negated(self._sources[name])
            finally:
                self._negating.pop()
        choices = list(_failures(schema))
        for keyword in ("allOf", "anyOf", "oneOf"):
            negations: list[Schema] = [{"not": item} for item in schema.get(keyword, ())]
            if keyword == "allOf":
                choices += negations
            elif negations:
                choices.append({"allOf": negations})
                if keyword == "oneOf":
                    choices += [{"allOf": list(pair)} for pair in combinations(schema["oneOf"], 2)]
        if "if" in schema:
            condition = schema["if"]
            choices.append({"allOf": [condition, {"not": schema.get("then", True)}]})
            choices.append({"allOf": [{"not": condition}, {"not": schema.get("else", True)}]})
        if not choices and schema:
            raise UnsupportedError(f"'not' of {', '.join(map(repr, schema))} is not supported")
        return {"$any": choices}

    # ---- names of properties

    def _names(self, schema: Schema) -> dict[str, Any]:
        """Return the constraint on the names of properties: {} or {"enum": names} or {"pattern": regular
        expression}."""
        schema = self._resolved(schema)
        if isinstance(schema, bool):
            return {} if schema else {"enum": []}
        schema = {keyword: value for keyword, value in schema.items() if keyword != "type" or value != "string"}
        if not schema:
            return {}
        if "const" in schema or "enum" in schema:
            rest = {keyword: value for keyword, value in schema.items() if keyword not in ("const", "enum")}
            if not rest:
                values = schema.get("enum", [schema.get("const")])
                return {"enum": [value for value in values if isinstance(value, str)]}
        if schema.keys() == {"pattern"}:
            return schema
        if schema.keys() <= {"minLength", "maxLength"}:
            return {"pattern": f"^[^\\x00-\\x1f]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}$"}
        raise UnsupportedError(f"propertyNames with {', '.join(map(repr, schema))} is not supported")

    # ---- what has been evaluated

    def _evaluated(self, schema: dict[str, Any]) -> Iterator[Schema]:
        """Return the schema without unevaluatedProperties and unevaluatedItems, as the ways in which it can be
        satisfied."""
        rest = dict(schema)
        properties = rest.pop("unevaluatedProperties", True)
        items = rest.pop("unevaluatedItems", True)
        for count, parts in enumerate(self._ways(rest, 0)):
            if count == _MAX_ALTERNATIVES:
                raise UnsupportedError("unevaluatedProperties and unevaluatedItems: the schema has too many branches")
            found = [part for part in parts if isinstance(part, dict)]
            closing: dict[str, Any] = {}
            if properties is not True and not any(
                {"additionalProperties", "unevaluatedProperties"} & part.keys() for part in found
            ):
                for keyword in ("properties", "patternProperties"):
                    names = {name: True for part in found for name in part.get(keyword, ())}
                    closing |= {keyword: names} if names else {}
                closing["additionalProperties"] = properties
            if items is not True and not any({"items", "unevaluatedItems"} & part.keys() for part in found):
                longest = max((len(part.get("prefixItems", ())) for part in found), default=0)
                contained = [part["contains"] for part in found if "contains" in part]
                closing |= {"prefixItems": [True] * longest} if longest else {}
                closing["items"] = {"anyOf": [items, *contained]} if contained else items
            yield {"allOf": [*parts, closing]}

    def _ways(self, schema: Schema, depth: int) -> Iterator[list[Schema]]:
        """Return lists of schemas that a document may match together, each without keywords that apply subschemas in
        place."""
        if depth > 20:
            raise UnsupportedError("unevaluatedProperties and unevaluatedItems of a recursive schema are not supported")
        if isinstance(schema, bool):
            yield [schema]
            return
        if "$ref" in schema:
            yield from self._ways(self._sources[schema["$ref"]], depth + 1)
            return
        rest = dict(schema)
        every: list[Schema] = rest.pop("allOf", [])
        choices: list[list[Schema]] = [[item] for item in every]
        if "anyOf" in rest:
            branches: list[Schema] = rest.pop("anyOf")
            choices.append([*({"allOf": list(both)} for both in combinations(branches, 2)), *branches])
        if "oneOf" in rest:
            choices.append(list(self._exactly_one(rest.pop("oneOf"))))
        if "if" in rest:
            condition = rest.pop("if")
            then = rest.pop("then", True)
            otherwise = rest.pop("else", True)
            choices.append([{"allOf": [condition, then]}, {"allOf": [{"not": condition}, otherwise]}])
        for name, dependent in rest.pop("dependentSchemas", {}).items():
            choices.append([_without(name, hidden=True), {"type": "object", "required": [name], "allOf": [dependent]}])
        yield from self._products([rest], choices, depth)

    def _products(self, start: list[Schema], choices: list[list[Schema]], depth: int) -> Iterator[list[Schema]]:
        if not choices:
            yield start
            return
        for choice in choices[0]:
            for parts in self._ways(choice, depth + 1):
                yield from self._products(start + parts, choices[1:], depth)


_REWRITES: dict[str, Callable[[_Rewriting, dict[str, Any]], list[Schema]]] = {
    "if": _Rewriting._conditional,
    "dependentRequired": _Rewriting._dependent_required,
    "dependentSchemas": _Rewriting._dependent_schemas,
    "contains": _Rewriting._contains,
    "oneOf": _Rewriting._one_of,
    "uniqueItems": _Rewriting._unique_items,
    "not": _Rewriting._not,
}


def _without(name: str, hidden: bool = False) -> Schema:
    """Forbid a property of this name. hidden: in a form that does not make the name an evaluated property."""
    absent: Schema = {"properties": {name: False}}
    return {"not": {"not": absent}} if hidden else absent


def types_of(schema: dict[str, Any]) -> set[str]:
    """Return the types of documents that may match a schema; an integer is a number."""
    names = schema.get("type", TYPES)
    found = {"number" if name == "integer" else name for name in ([names] if isinstance(names, str) else names)}
    values = _values(schema)
    return found if values is None else found & {_type(value) for value in values}


def _values(schema: dict[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _equal(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal: 1 equals 1.0, but not true."""
    return _type(first) == _type(second) and bool(first == second)


def _failures(schema: dict[str, Any]) -> Iterator[Schema]:
    """Yield the ways in which a document can fail a keyword of the schema. Keywords without a simple way are
    skipped."""
    for keyword, value in schema.items():
        if keyword in KEYWORDS["opposites"]:
            name, opposite, change = KEYWORDS["opposites"][keyword]
            if value + change >= 0 or name == "number":
                yield {"type": name, opposite: value + change}
        elif keyword in _FAILURES:
            yield from _FAILURES[keyword](value, schema)


def _other_types(value: str | list[str], schema: dict[str, Any]) -> Iterator[Schema]:
    names = [value] if isinstance(value, str) else value
    numeric = {"number", "integer"} if {"number", "integer"} & set(names) else set()
    yield {"type": [name for name in TYPES if name not in {*names, *numeric}]}


def _wrong_properties(properties: dict[str, Schema], schema: dict[str, Any]) -> Iterator[Schema]:
    for name, item in properties.items():
        yield {"type": "object", "required": [name], "properties": {name: {"not": item}}}


def _wrong_prefix(items: list[Schema], schema: dict[str, Any]) -> Iterator[Schema]:
    for index, item in enumerate(items):
        yield {"type": "array", "minItems": index + 1, "prefixItems": [True] * index + [{"not": item}]}


def _wrong_item(item: Schema, schema: dict[str, Any]) -> Iterator[Schema]:
    first = len(schema.get("prefixItems", ()))
    yield {"type": "array", "minItems": first + 1, "prefixItems": [True] * first + [{"not": item}]}


def _no_such_item(item: Schema, schema: dict[str, Any]) -> Iterator[Schema]:
    if schema.get("minContains", 1) == 1:
        yield {"type": "array", "items": {"not": item}}


def _missing_dependents(dependents: dict[str, list[str]], schema: dict[str, Any]) -> Iterator[Schema]:
    for name, others in dependents.items():
        yield from ({"required": [name], **_absent_of_object(other)} for other in others)


def _wrong_dependents(dependents: dict[str, Schema], schema: dict[str, Any]) -> Iterator[Schema]:
    for name, dependent in dependents.items():
        yield {"type": "object", "required": [name], "not": dependent}


def _absent_of_object(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: False}}


def _other_values(values: list[Any]) -> Iterator[Schema]:
    """Return schemas of documents that differ from the given ones: of other types, or longer or larger than all of
    them."""
    kinds: dict[str, list[Any]] = {name: [] for name in TYPES}
    for value in values:
        kinds[_type(value)].append(value)
    yield {"type": [name for name, found in kinds.items() if not found]}
    yield from ({"const": value} for value in (True, False) if kinds["boolean"] and value not in kinds["boolean"])
    if kinds["number"]:
        yield {"type": "number", "exclusiveMinimum": max(kinds["number"])}
    for name, keyword in (("string", "minLength"), ("array", "minItems"), ("object", "minProperties")):
        if kinds[name]:
            yield {"type": name, keyword: max(map(len, kinds[name])) + 1}


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _restrict_names(schema: dict[str, Any], names: dict[str, Any]) -> None:
    """Allow only properties of these names in an object. Changes the schema in place."""
    if not names:
        return
    if "patternProperties" in schema:
        raise UnsupportedError("propertyNames beside patternProperties is not supported")
    listed = schema.setdefault("properties", {})
    others = schema.get("additionalProperties", True)
    schema["additionalProperties"] = False
    if "enum" in names:
        listed |= {name: others for name in names["enum"] if name not in listed}
        allowed = set(names["enum"])
        listed |= {name: False for name in listed if name not in allowed}
    else:
        schema["patternProperties"] = {names["pattern"]: others}
        try:
            matches = re.compile(names["pattern"]).search
        except re.error as error:
            raise UnsupportedError(f"propertyNames: the pattern is not supported: {error_text(error)}") from error
        listed |= {name: False for name in listed if not matches(name)}
    if not listed:
        del schema["properties"]


_FAILURES: dict[str, Callable[[Any, dict[str, Any]], Iterable[Schema]]] = {  # by keyword
    "type": _other_types,
    "const": lambda value, schema: _other_values([value]),
    "enum": lambda values, schema: _other_values(values),
    "required": lambda names, schema: [_absent_of_object(name) for name in names],
    "properties": _wrong_properties,
    "prefixItems": _wrong_prefix,
    "items": _wrong_item,
    "contains": _no_such_item,
    "not": lambda allowed, schema: [allowed],
    "dependentRequired": _missing_dependents,
    "dependentSchemas": _wrong_dependents,
}
