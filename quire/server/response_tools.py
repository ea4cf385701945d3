"""The tools of /v1/responses: their form for the model, and the items for their calls."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import from_json

from quire.server.custom_tools import arguments_of
from quire.server.errors import ApiError
from quire.server.fields import TABLES, FunctionName

SEPARATOR = "__"  # between namespace and tool in a combined name
LOCAL_SHELL: dict[str, Any] = TABLES["responses"]["local_shell"]  # the function that is shown to the model


class _Object(BaseModel):
    """Further fields are kept."""

    model_config = ConfigDict(extra="allow")


class FunctionTool(_Object):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object: the arguments.")
    strict: bool | None = None


class TextOrGrammar(_Object):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @property
    def in_chats(self) -> dict[str, Any]:
        """Return the same with the field names of chats."""
        grammar = {"syntax": self.syntax, "definition": self.definition}
        return {"type": self.type, "grammar": grammar} if self.type == "grammar" else {"type": self.type}


class CustomTool(_Object):
    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: TextOrGrammar | None = None


class LocalShellTool(_Object):
    """Commands that the client runs."""

    type: Literal["local_shell"]


class HostedTool(_Object):
    """A tool that runs at OpenAI. It is left out."""

    type: str


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    return kind if kind in ("function", "custom", "namespace", "local_shell") else "hosted"


_Single = (
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[LocalShellTool, Tag("local_shell")]
    | Annotated[HostedTool, Tag("hosted")]
)
_WRONG_TYPE = ("tool", "The type of a tool should be a string, such as function or custom")


class NamespaceTool(_Object):
    """A group of tools."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    tools: list[Annotated[_Single, Discriminator(_kind, *_WRONG_TYPE)]]


AnyTool = Annotated[_Single | Annotated[NamespaceTool, Tag("namespace")], Discriminator(_kind, *_WRONG_TYPE)]


class NamedChoice(FunctionName):
    type: Literal["function", "custom"]
    namespace: str | None = None


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


@dataclass(frozen=True)
class Named:
    """A tool that the model may call. Its name includes its namespace, if it is in one."""

    tool: FunctionTool | CustomTool | LocalShellTool
    namespace: str | None = None

    @property
    def own_name(self) -> str:
        return str(LOCAL_SHELL["name"]) if isinstance(self.tool, LocalShellTool) else self.tool.name

    @property
    def name(self) -> str:
        return flat_name(self.own_name, self.namespace)

    @property
    def in_chats(self) -> dict[str, Any]:
        """Return the tool for a chat request."""
        tool = self.tool
        if isinstance(tool, LocalShellTool):
            return {"type": "function", "function": LOCAL_SHELL}
        if isinstance(tool, CustomTool):
            custom: dict[str, Any] = {"name": self.name, "description": tool.description}
            custom |= {"format": tool.format.in_chats} if tool.format is not None else {}
            return {"type": "custom", "custom": custom}
        function = tool.model_dump(exclude={"type"}, exclude_none=True) | {"name": self.name}
        return {"type": "function", "function": function}

    def call(self, call_id: str) -> dict[str, Any]:
        """Return the item of a new call, without its id."""
        if isinstance(self.tool, LocalShellTool):
            return {"type": "local_shell_call", "call_id": call_id, "action": shell_action("")}
        kind = {"type": "custom_tool_call"} if isinstance(self.tool, CustomTool) else {"type": "function_call"}
        named = {"call_id": call_id, "name": self.own_name}
        return {**kind, **named} | ({} if self.namespace is None else {"namespace": self.namespace})


def flat_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def named_tools(tools: Iterable[Any]) -> list[Named]:
    """Return the tools of a request that the model may call."""
    found = []
    for tool in tools:
        inner, namespace = (tool.tools, tool.name) if isinstance(tool, NamespaceTool) else ([tool], None)
        found += [Named(one, namespace) for one in inner if isinstance(one, FunctionTool | CustomTool | LocalShellTool)]
    return found


def echoed(tool: BaseModel) -> dict[str, Any]:
    """Return a request's tool as the response repeats it: a function with all keys."""
    keys: dict[str, Any] = dict.fromkeys(("description", "parameters", "strict"))
    return (keys if isinstance(tool, FunctionTool) else {}) | tool.model_dump(exclude_none=True)


def hosted_types(tools: Iterable[Any]) -> list[str]:
    """Return the types of the tools that are left out."""
    inner = [one for tool in tools for one in (tool.tools if isinstance(tool, NamespaceTool) else [tool])]
    return [tool.type for tool in inner if isinstance(tool, HostedTool)]


def allowed(choice: AllowedTools, tools: Sequence[Named]) -> list[Named]:
    names = {flat_name(str(tool.get("name")), tool.get("namespace")) for tool in choice.tools}
    kinds = {tool.get("type") for tool in choice.tools}
    return [
        tool
        for tool in tools
        if tool.name in names
        or tool.own_name in names
        or (isinstance(tool.tool, LocalShellTool) and tool.tool.type in kinds)
    ]


def chosen(choice: NamedChoice, tools: Sequence[Named]) -> dict[str, Any]:
    """Return the tool_choice for a chat request. Raises ApiError if several tools have the name."""
    wanted = flat_name(choice.name, choice.namespace)
    found = [tool for tool in tools if tool.name == wanted] or [tool for tool in tools if tool.own_name == wanted]
    if len({tool.name for tool in found}) > 1:
        names = ", ".join(tool.name for tool in found)
        raise ApiError(400, f"tool_choice: {wanted!r} is the name of several tools: {names}", param="tool_choice")
    return {"type": choice.type, choice.type: {"name": found[0].name if found else wanted}}


def shell_action(arguments: str) -> dict[str, Any]:
    """Return the action of a local shell call. arguments: JSON text, possibly incomplete."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        value = {}
    given = value if isinstance(value, dict) else {}
    command = given.get("command", [])
    env = given.get("env")
    kinds = {"timeout_ms": int, "working_directory": str, "user": str}
    return {
        "type": "exec",
        "command": ["bash", "-lc", command] if isinstance(command, str) else [str(word) for word in command or ()],
        "env": {name: str(text) for name, text in env.items()} if isinstance(env, dict) else {},
        **{name: given[name] for name, kind in kinds.items() if isinstance(given.get(name), kind)},
    }


def function_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an item of type function_call, custom_tool_call or local_shell_call to a function call of a chat."""
    if item["type"] == "local_shell_call":
        action = {name: value for name, value in item["action"].items() if name != "type" and value}
        return {"name": LOCAL_SHELL["name"], "arguments": msgspec.json.encode(action).decode()}
    name = flat_name(item["name"], item.get("namespace"))
    is_custom = item["type"] == "custom_tool_call"
    return {"name": name, "arguments": arguments_of(item["input"]) if is_custom else item["arguments"]}
