"""POST /v1/messages, POST /v1/messages/count_tokens: Anthropic's API. Bodies become chat requests."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from quire.observability.logging import logger
from quire.parsing.events import Content, Event, Reasoning, ToolArguments, ToolCall
from quire.server.anthropic_blocks import AnyTool, HostedTool, InputMessage, Text, TextBlock, Tool, system_message
from quire.server.bodies import HeldBody
from quire.server.errors import ApiError, bad_value, json_response
from quire.server.fields import TABLES, ExtraArguments, Positive, Strings, TemplateArguments
from quire.server.generation import Server
from quire.server.messages import Message
from quire.server.protocol import Body, ChatRequest, Rendering
from quire.server.routing import StrictRoute, answers, stream_answers, validated
from quire.server.running_chat import Answer, RunningChat
from quire.server.streams import EventStream


class AnthropicRoute(StrictRoute):
    names = TABLES["anthropic"]["names"]


router = APIRouter(route_class=AnthropicRoute)
# Fields of ChatRequest, and their names in this API.
_SAMPLING = {"stop": "stop_sequences"} | {
    name: name
    for name in """max_tokens stream temperature top_p top_k kv_transfer_params cache_salt vllm_xargs
        chat_template_kwargs""".split()
}
_REFUSED: dict[str, str] = TABLES["anthropic"]["refused"]
_WITHOUT_EFFECT = frozenset(TABLES["anthropic"]["without_effect"].split())
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}  # others are "end_turn"


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the tool, with the type tool.")
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Positive | None = Field(None, description="Tokens of thinking, after which the answer begins.")


class JsonFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    effort: str | None = Field(None, description="Variable reasoning_effort of the chat template.")
    format: JsonFormat | None = None


class CountTokensRequest(Body):
    """A conversation. null is treated as omitted."""

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)] = Field(
        description="If the last one is the assistant's, the answer goes on with it."
    )
    system: Text | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True)] | None = Field(
        None, description="Those of other types than custom are ignored."
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="Default: as the chat template does.")
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The older name of output_config.format.")
    chat_template_kwargs: TemplateArguments | None = None

    def unsupported(self) -> tuple[str, str] | None:
        given = self.model_extra or {}
        return next(((name, why) for name, why in _REFUSED.items() if given.get(name)), None)

    def unknown(self) -> list[str]:
        return [name for name in super().unknown() if name not in _WITHOUT_EFFECT]

    def hosted_tools(self) -> list[str]:
        return [tool.type for tool in self.tools or () if isinstance(tool, HostedTool)]

    @property
    def has_later_system_messages(self) -> bool:
        return any(message.role == "system" for message in self.messages)

    def merge_system_messages(self) -> None:
        """Move all system messages to the beginning of the conversation, for templates that accept them only there."""
        moved = [text for message in self.messages if message.role == "system" for text in message.texts]
        system = [TextBlock(type="text", text=self.system)] if isinstance(self.system, str) else self.system or []
        self.system = [*system, *(TextBlock(type="text", text=text) for text in moved)]
        self.messages = [message for message in self.messages if message.role != "system"]

    def chat(self) -> ChatRequest:
        """Raises ApiError."""
        choice = self.tool_choice
        thinking = self.thinking
        fields: dict[str, Any] = {theirs: getattr(self, ours, None) for theirs, ours in _SAMPLING.items()}
        fields |= {"model": self.model, "messages": list(self._messages())}
        if self.messages[-1].role == "assistant":
            fields["continue_final_message"] = True
        if self.tools:
            own = [tool for tool in self.tools if isinstance(tool, Tool)]
            functions = [tool.model_dump(by_alias=True, exclude_none=True) for tool in own]
            fields["tools"] = [{"type": "function", "function": function} for function in functions] or None
        if choice is not None and choice.type == "tool" and choice.name is None:
            raise ApiError(400, "tool_choice.name: Field required", param="tool_choice.name")
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = _TOOL_CHOICES.get(choice.type, named)
            fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        if thinking is not None:
            switch = {"enable_thinking": thinking.type != "disabled"}
            fields["chat_template_kwargs"] = switch | (self.chat_template_kwargs or {})
            fields["thinking_token_budget"] = thinking.budget_tokens if thinking.type == "enabled" else None
        config = self.output_config or OutputConfig.model_validate({})
        fields["reasoning_effort"] = config.effort
        if (wanted := config.format or self.output_format) is not None:
            schema = {"name": "output", "schema": wanted.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return validated(ChatRequest, fields)

    def _messages(self) -> Iterator[dict[str, Any]]:
        if (system := system_message(self.system)) is not None:
            yield system
        tool_names: dict[str, str] = {}
        for message in self.messages:
            yield from message.translated(tool_names)


class MessagesRequest(CountTokensRequest):
    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Strings | None = None
    temperature: float | None = Field(None, ge=0, description="Default: as the model recommends.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    kv_transfer_params: dict[str, Any] | None = Field(None, description="See docs/disaggregation.md.")
    cache_salt: str | None = Field(None, min_length=1, description="Share cached prefixes with the same salt only.")
    vllm_xargs: ExtraArguments | None = Field(None, description="extra_args for plugins that process logits.")


class MessageAnswer(TypedDict):
    """usage: input_tokens plus cache_read_input_tokens is the prompt; the latter were found in the prefix cache."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: dict[str, Any]


class ErrorAnswer(TypedDict):
    type: Literal["error"]
    error: dict[str, str]


class MessageStream(EventStream):
    before_error = b"event: error\ndata: "
    done = b""
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'


async def _chat(body: CountTokensRequest, server: Server, held: HeldBody) -> ChatRequest:
    """Raises ApiError."""
    server.accept(body)
    if body.has_later_system_messages and not await _takes_later_system_messages(server, held):
        body.merge_system_messages()
    chat: ChatRequest = await held.run(body.chat)
    if server.llm.frontend.reasoning is None:
        chat.thinking_token_budget = None  # clients send it to any model; a model that does not think cannot exceed it
    return chat


async def _takes_later_system_messages(server: Server, held: HeldBody) -> bool:
    """Whether the chat template renders system messages that are not the first one."""
    if server.takes_later_system_messages is None:
        roles = ("system", "user", "system", "user")
        try:
            await server.render([Message(role=role, content="a") for role in roles], Rendering.model_validate({}), held)
            server.takes_later_system_messages = True
        except ApiError as error:
            if error.status_code != 400:
                raise
            server.takes_later_system_messages = False
            logger.warning(
                "The chat template takes system messages only at the beginning, so those of /v1/messages are moved "
                "there. Behind a new one, no prefix is found in the cache"
            )
    return server.takes_later_system_messages


@router.post("/v1/messages/count_tokens", responses=answers(dict[str, int], ErrorAnswer), response_model=None)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    held: HeldBody = request.state.body
    chat = await _chat(body, server, held)
    server.accept(chat)
    media = await server.load_media(chat.messages, chat.mm_processor_kwargs, held)
    prompt = await server.render(chat.messages, chat, held, media)
    try:
        server.llm.processor.check_length(prompt)
        await held.run(server.llm.processor.check_count, prompt)
        if media is None:
            token_ids = await held.run(server.llm.get_tokenizer().encode, prompt, False)
        else:
            token_ids = await asyncio.to_thread(media.token_ids, server.llm.processor, prompt)
    except ValueError as error:
        raise bad_value(error, (), "messages") from error
    return json_response({"input_tokens": len(token_ids)})


@router.post("/v1/messages", responses=stream_answers(MessageAnswer, ErrorAnswer), response_model=None)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    if not server.config.strict_max_tokens:
        body.max_tokens = server.longest_output(body.max_tokens)
    chat = await _chat(body, server, request.state.body)
    del body  # it may be large
    running_chat = await RunningChat.begin(request, chat, "msg")
    if chat.stream:
        return await MessageStream.begin(_stream(running_chat), running_chat.call.keep_alive_interval)
    [answer] = await running_chat.collect()
    return json_response(_message(running_chat, _content(answer), _stop(answer)))


def _usage(running_chat: RunningChat) -> dict[str, Any]:
    """Return every key of Anthropic's usage, since typed clients need all: null or 0 for features that only Anthropic
    has."""
    usage = running_chat.meter.usage
    details = usage.get("completion_tokens_details") or {}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": details.get("reasoning_tokens", 0)},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def _stop(answer: Answer) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)"""
    reason = answer.finish_reason or ""
    completion = answer.completion
    sequence = completion.stop_reason if completion is not None else None
    if reason == "stop" and isinstance(sequence, str):
        return "stop_sequence", sequence
    return _STOP_REASONS.get(reason, "end_turn"), None


def _message(
    running_chat: RunningChat, content: list[dict[str, Any]], stop: tuple[str | None, str | None]
) -> MessageAnswer:
    return {
        "id": running_chat.call.id,
        "type": "message",
        "role": "assistant",
        "model": running_chat.call.model,
        "content": content,
        "stop_reason": stop[0],
        "stop_sequence": stop[1],
        "stop_details": None,
        "container": None,
        "usage": _usage(running_chat),
    }


def _tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments, "caller": {"type": "direct"}}


def _content(answer: Answer) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        content.append({"type": "text", "text": answer.content, "citations": []})
    for call in answer.tool_calls:
        content.append(_tool_use(call.id, call.name, call.argument_object))
    return content


async def _stream(running_chat: RunningChat) -> AsyncGenerator[bytes]:
    index, block, begun = -1, "", False  # the open content block
    async with aclosing(running_chat.pieces()) as steps:
        async for pieces in steps:
            events = []
            if not begun:
                begun = True
                message = _message(running_chat, [], (None, None))
                message["usage"]["output_tokens"] = 0
                events = [_event("message_start", message=message), _event("ping")]
            for event in (event for piece in pieces for event in piece.events):
                kind, start, delta = _block(event, running_chat.answers[0])
                if start is not None and (kind != block or kind == "tool_use"):
                    events += [_event("content_block_stop", index=index)] if block else []
                    index = index + 1
                    block = kind
                    events.append(_event("content_block_start", index=index, content_block={"type": kind} | start))
                if delta is not None:
                    events.append(_event("content_block_delta", index=index, delta=delta))
            if events:
                yield b"".join(events)
    reason, sequence = _stop(running_chat.answers[0])
    delta = {"stop_reason": reason, "stop_sequence": sequence}
    end = _event("content_block_stop", index=index) if block else b""
    yield end + _event("message_delta", delta=delta, usage=_usage(running_chat)) + _event("message_stop")


def _block(event: Event, answer: Answer) -> tuple[str, dict[str, Any] | None, dict[str, str | None] | None]:
    """Return (type of the event's block, the block's initial object, the delta that the event adds to it)."""
    match event:
        case Reasoning(text):
            return "thinking", {"thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": text}
        case Content(text):
            return "text", {"text": "", "citations": []}, {"type": "text_delta", "text": text}
        case ToolCall(index, name):
            return "tool_use", _tool_use(answer.tool_calls[index].id, name, {}), None
        case ToolArguments(_, text):
            return "tool_use", None, {"type": "input_json_delta", "partial_json": text}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
