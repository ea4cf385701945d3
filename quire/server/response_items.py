"""Requests to /v1/responses: their items become chat messages."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, Tag

from quire.server.errors import ApiError
from quire.server.fields import TABLES, Positive, TemplateArguments, type_of
from quire.server.messages import MEDIA_PARTS, ContentPart, Message
from quire.server.protocol import UNSUPPORTED_IN_CHAT, ChatRequest, Generation
from quire.server.response_store import new_id
from quire.server.response_tools import (
    AllowedTools,
    AnyTool,
    Named,
    NamedChoice,
    allowed,
    chosen,
    function_of,
    hosted_types,
    named_tools,
)
from quire.server.routing import validated
from quire.text.chat_template import TEXT_PARTS

Item = dict[str, Any]


class MessageItem(Message):
    type: Literal["message"] = "message"


class _Object(BaseModel):
    """Further fields are kept."""

    model_config = ConfigDict(extra="allow")


class CallItem(_Object):
    """A tool call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON text of an object.")


class CallOutputItem(_Object):
    """The result of a client's tool."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)]


class CustomCallItem(_Object):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CustomOutputItem(_Object):
    type: Literal["custom_tool_call_output"]
    call_id: str
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)]


class ShellCallItem(_Object):
    """A command for the client's shell."""

    type: Literal["local_shell_call"]
    call_id: str
    action: dict[str, Any]


class ShellOutputItem(_Object):
    type: Literal["local_shell_call_output"]
    call_id: str = Field(validation_alias=AliasChoices("call_id", "id"))
    output: str


class ReasoningText(_Object):
    text: str


class ReasoningItem(_Object):
    """The model's thinking. The chat template receives neither its summary nor content that another server
    encrypted."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class HostedItem(_Object):
    """A call of a tool that runs at OpenAI. It is not shown to the model."""

    type: str


_FIELDS = TABLES["responses"]
_HOSTED = frozenset(_FIELDS["hosted_items"].split())
PREFIXES: dict[str, str] = _FIELDS["prefixes"]  # of ids


def _item_type(value: Any) -> str | None:
    kind = type_of(value, default="message")
    return "hosted" if kind in _HOSTED else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ShellCallItem, Tag("local_shell_call")]
    | Annotated[ShellOutputItem, Tag("local_shell_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[HostedItem, Tag("hosted")],
    Discriminator(
        _item_type, "item", f"Only items of these types are supported: {', '.join([*PREFIXES, *sorted(_HOSTED)])}"
    ),
]

_THINKING = "quire:"  # prefix of content that represents encrypted thinking


def encrypted(thinking: str) -> str:
    """Return the encrypted_content of thinking: the text in base64, since it is not secret from the client."""
    return _THINKING + base64.b64encode(thinking.encode()).decode()


def _decrypted(content: str) -> str:
    """Return the text of thinking, empty if another server encrypted it."""
    try:
        return base64.b64decode(content.removeprefix(_THINKING)).decode() if content.startswith(_THINKING) else ""
    except ValueError:
        return ""


class TextFormat(_Object):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="With type json_schema.")


class TextOptions(_Object):
    format: TextFormat | None = None


class ReasoningOptions(_Object):
    effort: str | None = Field(None, description="Variable of the chat template; none disables thinking.")


Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class ResponsesRequest(Generation):
    """A request in OpenAI's format. It may also contain vLLM's sampling parameters."""

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = Field(None, description="A system message before the conversation.")
    previous_response_id: str | None = Field(None, description="The stored response that this one continues.")
    store: bool | None = Field(
        None, description="Keep the response, so that it can be read and continued: the default."
    )
    background: bool | None = Field(None, description="Answer at once, and generate meanwhile; needs store.")
    include: list[str] | None = Field(
        None, description="message.output_text.logprobs, reasoning.encrypted_content, or others, without effect."
    )
    max_output_tokens: Positive | None = Field(None, description="Default: what the model's context has room for.")
    metadata: Metadata | None = Field(None, max_length=16)
    max_tool_calls: int | None = Field(None, description="Without effect.")
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = Field(None, description="Without effect.")
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = Field(None, description="Without effect.")
    service_tier: str | None = Field(None, description="Without effect.")
    stream_options: dict[str, Any] | None = Field(None, description="Without effect.")  # type: ignore[assignment]
    text: TextOptions | None = None
    tools: list[AnyTool] | None = Field(None, description="Those that run at OpenAI's are left out.")
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | AllowedTools | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto drops the beginning of a long input."
    )
    chat_template_kwargs: TemplateArguments | None = None
    mm_processor_kwargs: dict[str, Any] | None = Field(None, description="Settings of the preprocessing of pictures.")

    def unsupported(self) -> tuple[str, str] | None:
        for name in ("prompt_logprobs", "logprob_token_ids", "return_token_ids", "response_format", "use_beam_search"):
            if getattr(self, name):
                return name, "is not a field of /v1/responses"
        if (self.n or 1) > 1:
            return "n", "is 1 for /v1/responses"
        if self.background and self.store is False:
            return "background", "needs store, so that the response can be read later"
        return self.refused(UNSUPPORTED_IN_CHAT | _FIELDS["refused"])

    def unknown(self) -> list[str]:
        return [name for name in super().unknown() if name not in _FIELDS["without_effect"].split()]

    def hosted_tools(self) -> list[str]:
        return hosted_types(self.tools or ())

    @property
    def named_tools(self) -> dict[str, Named]:
        """Return the tools that the model may call, by the names that the model uses."""
        return {tool.name: tool for tool in named_tools(self.tools or ())}

    def drop_prompt(self) -> None:
        self.input = ""

    def items(self) -> list[Item]:
        """Return the input items in the format in which they are stored and listed: with ids, and contents as lists."""
        if isinstance(self.input, str):
            return [_stored(MessageItem(role="user", content=self.input))]
        return [_stored(item) for item in self.input]

    def chat(self, items: Iterable[Item]) -> ChatRequest:
        """Convert to a chat request. items: the conversation, including the input. Raises ApiError."""
        given = {name: getattr(self, name) for name in Generation.model_fields if name in self.model_fields_set}
        tools = list(self.named_tools.values())
        choice = self.tool_choice
        forced: Any = choice
        if isinstance(choice, AllowedTools):
            tools = allowed(choice, tools)
            forced = choice.mode
        elif isinstance(choice, NamedChoice):
            forced = chosen(choice, tools)
        format = self.text and self.text.format and self.text.format.model_dump(by_alias=True, exclude_none=True)
        if format and format["type"] == "json_schema":
            format = {"type": format.pop("type"), "json_schema": format}
        if self.truncation == "auto":
            given.setdefault("truncate_prompt_tokens", -1)
        fields = given | {
            "messages": _messages(self.instructions, items),
            "stream": self.stream or self.background,
            "stream_options": None,
            "logit_bias": self.logit_bias and {str(key): bias for key, bias in self.logit_bias.items()},
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "mm_processor_kwargs": self.mm_processor_kwargs,
            "logprobs": bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ()),
            "top_logprobs": self.top_logprobs,
            "response_format": format,
            "tools": [tool.in_chats for tool in tools] or None,
            "tool_choice": forced,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return validated(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def in_terms_of_responses(error: ApiError) -> ApiError:
    """Return the error of a translated request, with the name of the original field."""
    names = _FIELDS["names"]
    name = re.split(r"[.\[]", error.param or "")[0]
    if name in names:
        detail = error.detail.replace(f"{name}.json_schema", name)  # its fields are part of text.format here
        error.param, error.detail = names[name], detail.replace(name, names[name])
    return error


def _stored(item: BaseModel) -> Item:
    values = item.model_dump(exclude_none=True)
    stored = {"id": new_id(PREFIXES.get(values["type"], "item")), "status": "completed", **values}
    if isinstance(item, MessageItem):
        content = values.get("content", "")
        kind = {"type": "output_text", "annotations": []} if item.role == "assistant" else {"type": "input_text"}
        parts = [content] if isinstance(content, str) else content
        stored["content"] = [{**kind, "text": part} if isinstance(part, str) else part for part in parts]
    return stored


def _messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Convert items to chat messages. An assistant turn is one message with its thinking, text and tool calls.
    Consecutive system messages are merged, since many templates accept only one."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        last: dict[str, Any] = messages[-1] if messages else {"role": None}
        role = {"message": item.get("role")}.get(kind := item["type"], "assistant")
        if role == "developer":
            role = "system"
        if kind in _HOSTED:
            continue
        if kind in ("function_call", "custom_tool_call", "local_shell_call"):
            if last["role"] != "assistant":
                messages.append(last := {"role": role})
            call = {"id": item["call_id"], "type": "function", "function": function_of(item)}
            last.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            thinking = _text(item.get("content") or ()) or _decrypted(item.get("encrypted_content") or "")
            messages += [{"role": role, "reasoning": thinking}] if thinking else []
        elif kind.endswith("_output"):
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
        elif role == "assistant" and last.keys() == {"role", "reasoning"}:
            last["content"] = _text(item["content"])
        elif role == "system" == last["role"]:
            last["content"] += "\n\n" + _text(item["content"])
        else:
            extra = {name: item[name] for name in item if name not in ("id", "type", "status", "phase")}
            messages.append({**extra, "role": role, "content": _content(item["content"])})
    return messages


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a text, or a list of parts if there are pictures or other media."""
    if isinstance(content, str) or not any(part.get("type") in MEDIA_PARTS for part in content):
        return _text(content)
    return [
        dict(part) if part.get("type") in MEDIA_PARTS else {"type": "text", "text": _text([part])} for part in content
    ]


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") in MEDIA_PARTS:
            message = f"messages: {part['type']} is taken in messages of users and in outputs of functions only"
            raise ApiError(400, message, param="messages")
    return "\n".join(part[TEXT_PARTS.get(part.get("type", ""), "text")] for part in content)
