"""Calls that a request demands: tool_choice "required", or the name of a function. A grammar forces their JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.parsing.calls import ToolFormat, json_calls
from quire.text.parsing.events import Parser
from quire.text.parsing.reader import Parsing, Reader, Steps

_FORCED = ToolFormat(body=json_calls, bare="[{")


def forced_calls(choice: str | Mapping[str, Any]) -> Parser:
    """The parser of what the schema of `forced_calls_schema` allows."""
    return _FORCED.make() if choice == "required" else Parsing(_named_call, chosen_function(choice))


def forced_calls_schema(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], parallel: bool = True
) -> dict[str, Any]:
    """The JSON schema that enforces tool_choice, as in vLLM: a list of {"name": ..., "parameters": {...}} for
    "required", and the parameters alone for a named function.

    parallel: several calls are allowed. Raises ValueError if there is no function of that name.
    """
    given = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    parameters: dict[str, dict[str, Any]] = {
        name: schema or {"type": "object", "properties": {}} for name, schema in given.items()
    }
    if choice != "required":
        name = chosen_function(choice)
        if name not in parameters:
            raise ValueError(f"tool_choice names the function {name!r}, which is not in tools")
        return parameters[name]
    if not parameters:
        raise ValueError("tool_choice is 'required', but tools is empty")
    functions = list(enumerate(parameters.items()))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, (name, _) in functions
    ]
    definitions = {str(index): _moved(schema, f"#/$defs/{index}") for index, (_, schema) in functions}
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if parallel else {**schema, "maxItems": 1}


def chosen_function(choice: str | Mapping[str, Any]) -> str:
    """The name in a tool_choice that names a function."""
    return choice if isinstance(choice, str) else str((choice.get("function") or choice)["name"])


def _named_call(reader: Reader, name: str) -> Steps[None]:
    """Reads the arguments of a call whose name is known."""
    yield from reader.space()
    reader.call(name)
    while (yield from reader.until((), reader.arguments)):
        pass


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own root are right if it is at another place of a document."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
