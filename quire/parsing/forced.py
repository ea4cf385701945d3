"""Calls that a request requires: tool_choice "required", or the name of a tool. A grammar enforces their form."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.parsing.calls import ToolFormat, json_calls
from quire.parsing.events import Parser
from quire.parsing.reader import Parsing, Reader, Steps

_FORCED = ToolFormat(body=json_calls, bare="[{")


def forced_calls(choice: str | Mapping[str, Any]) -> Parser:
    """Return the parser of text that matches `forced_calls_schema`, or of a custom tool's input, which is the whole
    text."""
    if isinstance(choice, Mapping) and choice.get("type") == "custom":
        return Parsing(_custom_call, choice["custom"]["name"])
    return Parsing(_named_call, choice["function"]["name"]) if isinstance(choice, Mapping) else _FORCED.make()


def forced_calls_schema(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], parallel: bool = True
) -> dict[str, Any]:
    """Return the JSON schema that enforces tool_choice, as in vLLM: a list of {"name": ..., "parameters": {...}} for
    "required", and the parameters alone for a named function.

    parallel: several calls are allowed. Raises ValueError if there is no function of that name.
    """
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}
    if isinstance(choice, Mapping):
        name = choice["function"]["name"]
        if name not in functions:
            raise ValueError(f"tool_choice names the function {name!r}, which is not in tools")
        return dict(functions[name])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, name in enumerate(functions)
    ]
    definitions = {str(i): _moved(schema, f"#/$defs/{i}") for i, schema in enumerate(functions.values())}
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if parallel else {**schema, "maxItems": 1}


def _named_call(reader: Reader, name: str) -> Steps[None]:
    """Reads the arguments of a call whose name is known."""
    yield from reader.space()
    reader.call(name)
    while (yield from reader.until((), reader.arguments)):
        pass


def _custom_call(reader: Reader, name: str) -> Steps[None]:
    """Reads the input of a custom tool."""
    reader.call(name)
    while (yield from reader.until((), reader.arguments)):
        pass


def _moved(schema: Any, place: str) -> Any:
    """Return the schema with its references to its own root adjusted for another place in a document."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value[:1] == "#"
        else _moved(value, place)
        for key, value in schema.items()
    }
