"""Grammars (structural tags) that restrict a model to valid calls of the request's tools, in its own format.

The model thinks and answers freely. Once it opens a call, it must call one of the tools. If the tool is strict, the
arguments must match the tool's schema.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from quire.parsing.tables import formats

Json = dict[str, Any]
Level = Literal["auto", "function", "parameter"]

_TEXT: Json = {"type": "any_text"}
_NUMBER: Json = {"type": "regex", "pattern": "[0-9]{1,3}"}


class StrictFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models writes the calls of an answer.

    section: the text before the first call and after the last one, if the format has such text.
    call: the text before and after a call's arguments; {name} is the function's name, {number} the call's index.
    parameter: the text before and after a parameter's value, None if the arguments are a JSON object; {name} is the
        parameter's name, {is_string} "true" or "false".
    separator: the text between two calls.
    fences: JSON objects that are calls if they name a known function: the text up to the name, the text between the
        name and the arguments, and the text after them.
    trigger: the text that opens a call, by default the text before the section.
    """

    call: tuple[str, str]
    section: tuple[str, str] | None = None
    parameter: tuple[str, str] | None = None
    separator: str = ""
    fences: tuple[tuple[str, str, str], ...] = ()
    trigger: str = ""

    def tag(
        self, tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], parallel: bool, level: Level
    ) -> Json | None:
        """Return the structural tag for a request, None if its calls need no constraint.

        tools: the definitions in the request. choice: "auto", "required", or a dict that names a function. parallel:
        several calls are allowed. level: `--tool-strict-level`. Raises ValueError if there is no function of that name.
        """
        functions = [tool["function"] for tool in tools]
        if not any(function.get("strict") for function in functions) and level == "auto":
            return None
        if isinstance(choice, Mapping):
            name = choice["function"]["name"]
            functions = [function for function in functions if function["name"] == name]
            if not functions:
                raise ValueError(f"tool_choice names the function {name!r}, which is not in tools")
        is_forced = choice != "auto"
        is_single = not parallel or isinstance(choice, Mapping)
        calls = [self._call(f, is_forced or level == "parameter" or bool(f.get("strict"))) for f in functions]
        series = {"type": "tags_with_separator", "tags": calls, "separator": self.separator, "at_least_one": True}
        series["stop_after_first"] = is_single
        if self.section is not None:
            opening, closing = self.section
            calls = [{"type": "tag", "begin": opening, "content": series, "end": closing}]
            series = calls[0]
        if is_forced:
            return {"type": "structural_tag", "format": series}
        triggers = [self.trigger or calls[0]["begin"]]
        marked = list(calls)
        for beginning, middle, end in self.fences:
            for function, call in zip(functions, marked, strict=True):
                trigger = beginning.replace("{name}", function["name"])
                triggers.append(trigger)
                calls.append({**call, "begin": trigger + middle, "end": end})
        free = {"type": "triggered_tags", "triggers": triggers, "tags": calls, "stop_after_first": is_single}
        return {"type": "structural_tag", "format": free}

    def _call(self, function: Mapping[str, Any], is_strict: bool) -> Json:
        """Return a tag with the arguments of a function."""
        schema = function.get("parameters") if is_strict else None
        if schema is None:
            schema = {"type": "object"}
        content = _json(schema) if self.parameter is None else self._parameters(self.parameter, schema)
        begin, end = self.call
        begin, _, rest = begin.replace("{name}", function["name"]).partition("{number}")
        if rest:
            content = _sequence([_NUMBER, {"type": "const_string", "value": rest}, content])
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    def _parameters(self, around: tuple[str, str], schema: Any) -> Json:
        """Return the parameters of a call, in the order of the schema's properties."""
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if not isinstance(properties, dict) or not properties:
            return {"type": "star", "content": self._any_parameter(around)}
        required = schema.get("required") or []
        elements = []
        for name, value in properties.items():
            values, is_string = _value(value, schema)
            begin = around[0].replace("{name}", name).replace("{is_string}", "true" if is_string else "false")
            alternatives = [{"type": "tag", "begin": begin, "content": one, "end": around[1]} for one in values]
            tag = alternatives[0] if len(alternatives) == 1 else {"type": "or", "elements": alternatives}
            elements.append(tag if name in required else {"type": "optional", "content": tag})
        return _sequence(elements)

    def _any_parameter(self, around: tuple[str, str]) -> Json:
        begin, _, rest = around[0].partition("{name}")
        elements: list[Json] = [{"type": "regex", "pattern": r"[A-Za-z0-9_.-]{1,64}"}]
        before, marker, after = rest.partition("{is_string}")
        if marker:
            elements += [{"type": "const_string", "value": before}, {"type": "regex", "pattern": "true|false"}]
        elements.append({"type": "tag", "begin": after if marker else rest, "content": _TEXT, "end": around[1]})
        return {"type": "tag", "begin": begin, "content": _sequence(elements), "end": ""}


STRICT: dict[str, StrictFormat] = formats(__file__, StrictFormat, ())


def _sequence(elements: list[Json]) -> Json:
    return {"type": "sequence", "elements": elements}


def _json(schema: Any) -> Json:
    return {"type": "json_schema", "json_schema": schema}


def _value(schema: Any, root: Mapping[str, Any]) -> tuple[list[Json], bool]:
    """Return the formats of a parameter's value, and whether it is a string, which is written without quotes."""
    seen = set[str]()
    while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"] not in seen:
        seen.add(schema["$ref"])
        target: Any = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        schema = target
    if not isinstance(schema, dict):
        return [_TEXT], True
    constants = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(constants, list) and constants and all(isinstance(constant, str) for constant in constants):
        return [{"type": "const_string", "value": constant} for constant in constants], True
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds or kinds == [None]:  # any text is a string
        return [_TEXT], True
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return [_json({**definitions, **schema})], False
