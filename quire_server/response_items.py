"""The items of /v1/responses: those of a request become chat messages, and the events of an answer become items."""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from quire.text.chat_template import TEXT_PARTS
from quire_parsing.events import Content, Event, Reasoning, ToolCall
from quire_server.answering import Answer
from quire_server.errors import ApiError
from quire_server.fields import TABLES, FunctionName, Positive, TemplateArguments
from quire_server.messages import MEDIA_PARTS, ContentPart, Message
from quire_server.protocol import UNSUPPORTED_IN_CHAT, ChatRequest, Generation
from quire_server.routing import validated

Item = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(24)}"


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
    """What the client's tool returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)]


class ReasoningText(_Object):
    text: str


class ReasoningItem(_Object):
    """What the model thought. Its summary and what is encrypted do not reach the chat template."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of ids


def _item_type(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type, "item", f"Only items of these types are supported: {', '.join(_PREFIXES)}"),
]


class FunctionTool(_Object):
    type: Literal["function"]
    name: str = Field(min_length=1)
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object: the arguments.")


class FunctionChoice(FunctionName):
    type: Literal["function"]


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class TextFormat(_Object):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="With type json_schema.")


class TextOptions(_Object):
    format: TextFormat | None = None


class ReasoningOptions(_Object):
    effort: str | None = Field(None, description="Variable of the chat template; none disables thinking.")


Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]

_FIELDS = TABLES["responses"]


class ResponsesRequest(Generation):
    """vLLM's sampling parameters can be sent, too."""

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = Field(None, description="A system message before the conversation.")
    previous_response_id: str | None = Field(None, description="The stored response that this one continues.")
    store: bool | None = Field(
        None, description="Keep the response, so that it can be read and continued: the default."
    )
    background: bool | None = Field(None, description="Answer at once, and generate meanwhile; needs store.")
    include: list[str] | None = Field(None, description="message.output_text.logprobs, or others, without effect.")
    max_output_tokens: Positive | None = Field(None, description="Default: what the model's context has room for.")
    metadata: Metadata | None = Field(None, max_length=16)
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: dict[str, Any] | None = Field(None, description="Without effect.")  # type: ignore[assignment]
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | AllowedTools | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto drops the beginning of a long input."
    )
    chat_template_kwargs: TemplateArguments | None = None
    mm_processor_kwargs: dict[str, Any] | None = Field(None, description="Settings of the preprocessing of pictures.")

    def unsupported(self) -> tuple[str, str] | None:
        for name in ("prompt_logprobs", "logprob_token_ids", "return_token_ids", "response_format"):
            if getattr(self, name):
                return name, "is not a field of /v1/responses"
        if (self.n or 1) > 1:
            return "n", "is 1 for /v1/responses"
        if self.background and self.store is False:
            return "background", "needs store, so that the response can be read later"
        return self.refused(UNSUPPORTED_IN_CHAT | _FIELDS["refused"])

    def unknown(self) -> list[str]:
        return [name for name in super().unknown() if name not in _FIELDS["without_effect"].split()]

    def drop_prompt(self) -> None:
        self.input = ""

    def items(self) -> list[Item]:
        """The items of the input in the form in which they are stored and listed: with ids, and contents as lists."""
        if isinstance(self.input, str):
            return [_stored(MessageItem(role="user", content=self.input))]
        return [_stored(item) for item in self.input]

    def chat(self, items: Iterable[Item]) -> ChatRequest:
        """The request in the terms of chats. items: the conversation, with those of the input. Raises ApiError."""
        given = {name: getattr(self, name) for name in Generation.model_fields if name in self.model_fields_set}
        tools: list[FunctionTool] = self.tools or []
        choice: Any = self.tool_choice
        if isinstance(choice, AllowedTools):
            allowed = {tool.name for tool in choice.tools}
            tools, choice = [tool for tool in tools if tool.name in allowed], choice.mode
        elif isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
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
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in tools
            ]
            or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return validated(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def in_terms_of_responses(error: ApiError) -> ApiError:
    """The error of a translated request, with the name of the field from which the wrong one was translated."""
    names, name = _FIELDS["names"], re.split(r"[.\[]", error.param or "")[0]
    if name in names:
        error.param, error.detail = names[name], error.detail.replace(name, names[name])
    return error


def _stored(item: BaseModel) -> Item:
    values = item.model_dump(exclude_none=True)
    stored = {"id": new_id(_PREFIXES[values["type"]]), "status": "completed", **values}
    if isinstance(item, MessageItem):
        content = values.get("content", "")
        kind = {"type": "output_text", "annotations": []} if item.role == "assistant" else {"type": "input_text"}
        parts = [content] if isinstance(content, str) else content
        stored["content"] = [{**kind, "text": part} if isinstance(part, str) else part for part in parts]
    return stored


def _messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Chat messages of items. A turn of the assistant is one message, with its thinking, its text and its tool calls.
    Consecutive system messages are one, too, since many templates accept only one."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        last: dict[str, Any] = messages[-1] if messages else {"role": None}
        role = {"function_call_output": "tool", "message": item.get("role")}.get(item["type"], "assistant")
        if role == "developer":
            role = "system"
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            if last["role"] != "assistant":
                messages.append(last := {"role": role})
            last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        elif item["type"] == "reasoning":
            messages.append({"role": role, "reasoning": _text(item.get("content", []))})
        elif item["type"] == "function_call_output":
            messages.append({"role": role, "tool_call_id": item["call_id"], "content": _content(item["output"])})
        elif role == "assistant" and last.keys() == {"role", "reasoning"}:
            last["content"] = _text(item["content"])
        elif role == "system" == last["role"]:
            last["content"] += "\n\n" + _text(item["content"])
        else:
            extra = {name: item[name] for name in item if name not in ("id", "type", "status", "phase")}
            messages.append({**extra, "role": role, "content": _content(item["content"])})
    return messages


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """A text, or parts where some are pictures or other media."""
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


class Events(list[bytes]):
    """The events of a stream, numbered from 0, that were not taken yet."""

    def __init__(self) -> None:
        self._number = 0

    def make(self, kind: str, **fields: Any) -> None:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), data))
        self._number += 1

    def take(self) -> bytes:
        taken = b"".join(self)
        self.clear()
        return taken


# The type of the item that an event belongs to, and what such an item has before its text.
_KINDS = {Reasoning: "reasoning", Content: "message"}
_BLANK: dict[str, Item] = {"reasoning": {"summary": []}, "message": {"role": "assistant"}}


class Output:
    """The output items of a response, built while an answer comes, and the events that tell of them.

    items: those that are complete.
    """

    def __init__(self, events: Events) -> None:
        self.items: list[Item] = []
        self._events = events
        self._open: Item = {"type": None}  # the item whose text is coming
        self._texts: list[str] = []  # the pieces of its text
        self._logprobs: list[Any] = []

    def add(self, event: Event, answer: Answer, logprobs: list[Any]) -> None:
        """logprobs: of the tokens with which the event came."""
        kind = _KINDS.get(type(event), "function_call")
        if isinstance(event, ToolCall):
            call_id = answer.tool_calls[event.index].id
            self._begin({"type": kind, "id": new_id("fc"), "call_id": call_id, "name": event.name, "arguments": ""})
            return
        if self._open["type"] != kind:
            self._begin({"type": kind, "id": new_id(_PREFIXES[kind]), **_BLANK[kind]})
        self._delta(event.text, logprobs if kind == "message" else [])

    def replay(self, item: Item) -> None:
        """Add a complete item, with its whole text at once."""
        part = {"text": item["arguments"]} if item["type"] == "function_call" else item["content"][0]
        self._begin({name: "" if name == "arguments" else value for name, value in item.items()})
        self._delta(part["text"], part.get("logprobs", []))
        self.close(item["status"])

    def close(self, status: str = "completed") -> None:
        """Complete the item whose text was coming, if there is one."""
        item, text = self._open, "".join(self._texts)
        if item["type"] is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            self._event("function_call_arguments.done", name=item["name"], arguments=text)
        else:
            item["content"] = [part := self._part(text)]
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            self._event(f"{part['type']}.done", text=text, **logprobs)
            self._event("content_part.done", part=part)
        self._events.make("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open, self._texts, self._logprobs = {"type": None}, [], []

    def _begin(self, item: Item) -> None:
        self.close()
        self._open = {**item, "status": "in_progress"}
        if item["type"] != "function_call":
            self._open["content"] = []
        self._events.make("response.output_item.added", output_index=len(self.items), item=self._open)
        if item["type"] != "function_call":
            self._event("content_part.added", part=self._part(""))

    def _delta(self, text: str, logprobs: list[Any]) -> None:
        self._texts.append(text)
        self._logprobs += logprobs
        if self._open["type"] == "message":
            self._event("output_text.delta", delta=text, logprobs=logprobs)
        elif self._open["type"] == "reasoning":
            self._event("reasoning_text.delta", delta=text)
        else:
            self._event("function_call_arguments.delta", delta=text)

    def _event(self, kind: str, **fields: Any) -> None:
        if self._open["type"] != "function_call":
            fields["content_index"] = 0
        self._events.make(f"response.{kind}", item_id=self._open["id"], output_index=len(self.items), **fields)

    def _part(self, text: str) -> Item:
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
