"""Ollama's API: POST /api/generate, /api/chat and /api/show, GET /api/tags, /api/ps and /api/version.

Bodies become chat requests.
"""

import hashlib
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from quire.messages.outputs import CompletionOutput
from quire_parsing.events import Content, Reasoning
from quire_server.answering import Answering, FunctionCall
from quire_server.errors import ApiError, json_response
from quire_server.fields import TABLES, Logprobs, Objects, Strings
from quire_server.generation import Call, Server
from quire_server.protocol import Body, ChatRequest
from quire_server.routing import StrictRoute, answers, stream_answers, validated
from quire_server.streams import EventStream

OLLAMA_VERSION = "0.12.6"  # of Ollama, whose API this is: clients ask for it to find out what they may use
_OPTIONS: dict[str, str] = TABLES["ollama"]["options"]  # and their names in ChatRequest


class OllamaRoute(StrictRoute):
    names = {theirs: f"options.{ours}" for ours, theirs in _OPTIONS.items()}  # noqa: RUF012  (read only)
    names |= {"response_format": "format", "reasoning_effort": "think"}


router = APIRouter(route_class=OllamaRoute)


class NamedModel(Body):
    """model: a served model's name, also with the tag `latest`."""

    def accepted(self, server: Server) -> str:
        """The name as the client wrote it. Raises ApiError."""
        given = self.model
        if given and given not in server.names:
            self.model = given.removesuffix(":latest")
        name = server.accept(self)
        return given or name


class ShowRequest(NamedModel):
    name: str | None = Field(None, description="The older name of model.")


class Generation(NamedModel):
    stream: bool | None = Field(None, description="Default: true.")
    options: dict[str, Any] | None = Field(None, description=f"{', '.join(_OPTIONS)}; others are ignored.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a JSON schema.")
    think: bool | str | None = Field(None, description="Think before the answer; low, medium and high are degrees.")
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = Field(None, description="Only with logprobs.")
    keep_alive: float | str | None = Field(None, description="Ignored: the model stays loaded.")

    def accepted(self, server: Server) -> str:
        name = super().accepted(server)
        if self.think and server.llm.frontend.reasoning is None:
            raise ApiError(400, f"think: the model {name!r} does not support thinking", param="think")
        return name

    def unsupported(self) -> tuple[str, str] | None:
        given, refused = self.model_extra or {}, TABLES["ollama"]["refused"]
        return next(((name, why) for name, why in refused.items() if given.get(name)), None)

    def unknown(self) -> list[str]:
        return [*super().unknown(), *(f"options.{name}" for name in self.options or () if name not in _OPTIONS)]

    def translated(self, messages: list[dict[str, Any]], **extra: Any) -> ChatRequest:
        """Raises ApiError."""
        fields = {_OPTIONS[name]: value for name, value in (self.options or {}).items() if name in _OPTIONS}
        if isinstance(limit := fields.get("max_tokens"), int) and limit <= 0:  # -1 and -2: as many as fit
            del fields["max_tokens"]
        if self.format:
            schema = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
            fields["response_format"] = {"type": "json_object"} if self.format == "json" else schema
        if isinstance(self.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        else:
            fields["reasoning_effort"] = self.think
        fields |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs, "stream": self.stream is not False}
        return validated(ChatRequest, {**fields, "model": self.model, "messages": messages, **extra})


Images = Annotated[Strings, Field(description="Pictures in base64, for models that see.")]
_PICTURE = re.compile(r"(messages\[\d+\])\.content\[\d+\]\.image_url")  # in translated requests


def _with_images(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    if not images:
        return text
    parts = [{"type": "image_url", "image_url": {"url": f"data:image;base64,{image}"}} for image in images]
    return [*parts, {"type": "text", "text": text}]


class GenerateRequest(Generation):
    prompt: str | None = None
    images: Images | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="Continue the prompt as it is, without the chat template.")

    def unsupported(self) -> tuple[str, str] | None:
        if self.raw and self.images:
            return "images", "cannot be used with raw, since the chat template says where pictures are"
        return super().unsupported()

    def chat(self) -> ChatRequest:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        content = _with_images(self.prompt or "", self.images)
        return self.translated([*messages, {"role": "user", "content": content}])


class Function(BaseModel):
    name: str
    arguments: dict[str, Any]


class ToolCall(BaseModel):
    id: str | None = None
    function: Function


class OllamaMessage(BaseModel):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None


class OllamaChatRequest(Generation):
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: Objects | None = None

    def chat(self) -> ChatRequest:
        return self.translated(list(self._messages()), tools=self.tools)

    def _messages(self) -> Iterator[dict[str, Any]]:
        """OpenAI's messages. Ollama's results of tools follow the order of the calls, which need no ids."""
        numbers, waiting = count(), deque[str]()
        for message in self.messages or ():
            calls = []
            for call in message.tool_calls or ():
                waiting.append(call.id or f"call{next(numbers):05}")
                arguments = msgspec.json.encode(call.function.arguments).decode()
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": waiting[-1], "type": "function", "function": function})
            content = _with_images(message.content or "", message.images)
            fields = {"role": message.role, "content": content, "reasoning": message.thinking}
            if message.role == "tool":
                answered = message.tool_call_id or (waiting.popleft() if waiting else None)
                fields |= {"tool_call_id": answered, "name": message.tool_name}
            yield {**fields, "tool_calls": calls or None}


class LineStream(EventStream):
    """Lines of JSON, among which clients expect nothing else: an idle stream gets parts without text."""

    media_type = "application/x-ndjson"
    before_error, after_error, done = b"", b"\n", b""


_ANSWERS = answers(dict[str, Any], dict[str, str])
_STREAM = stream_answers(dict[str, Any], dict[str, str], LineStream.media_type)


@router.post("/api/generate", responses=_STREAM, response_model=None)
async def answer_prompt(body: GenerateRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    reply, raw, prompt = Reply(body.accepted(server), is_chat=False), body.raw, body.prompt
    if not prompt:
        return json_response(reply.part(done=True, done_reason="load"))
    chat = await request.state.body.run(body.chat)
    del body  # it may be large
    if not raw:
        return await reply.send(await _begin(request, chat, "gen", "images"))
    call = Call(server, request, chat, "gen")
    await call.process([prompt], server.llm.processor.generation_config.get("max_new_tokens"), True, "prompt")
    return await reply.send(Answering(call, chat))


@router.post("/api/chat", responses=_STREAM, response_model=None)
async def answer_chat(body: OllamaChatRequest, request: Request) -> Response:
    reply = Reply(body.accepted(request.app.state.server), is_chat=True)
    if not body.messages:
        return json_response(reply.part(done=True, done_reason="load"))
    chat = await request.state.body.run(body.chat)
    del body
    return await reply.send(await _begin(request, chat, "chat", r"\1.images"))


async def _begin(request: Request, chat: ChatRequest, prefix: str, images: str) -> Answering:
    """images: the name of the field that has the pictures, which errors name."""
    try:
        return await Answering.begin(request, chat, prefix)
    except ApiError as error:
        error.param = error.param and _PICTURE.sub(images, error.param)
        error.detail = _PICTURE.sub(images, error.detail)
        raise


@dataclass(frozen=True)
class Reply:
    """The answer to a chat, or to a prompt. model: its name as the client wrote it."""

    model: str
    is_chat: bool

    def part(
        self, text: str = "", thinking: str | None = None, calls: Sequence[FunctionCall] = (), **fields: Any
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": text} if self.is_chat else {"response": text}
        if thinking:
            said["thinking"] = thinking
        if calls:
            functions = [(call.id, {"name": call.name, "arguments": call.argument_object}) for call in calls]
            said["tool_calls"] = [{"id": id, "function": function} for id, function in functions]
        head = {"model": self.model, "created_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"}
        return {**head, **({"message": said} if self.is_chat else said), **fields}

    async def send(self, answering: Answering) -> Response:
        if answering.body.stream:
            return await LineStream.begin(
                self._stream(answering), answering.call.keep_alive_interval, _line(self.part(done=False))
            )
        [answer] = await answering.collect()
        assert answer.completion is not None
        fields = {**_logprobs(answering, answer.completion), **_end(answering)}
        return json_response(self.part(answer.content or "", answer.reasoning, answer.tool_calls, **fields))

    async def _stream(self, answering: Answering) -> AsyncGenerator[bytes]:
        num_calls = 0  # that were sent, each when it is complete
        async with aclosing(answering.pieces()) as steps:
            async for pieces in steps:
                for piece in pieces:
                    text = "".join(event.text for event in piece.events if isinstance(event, Content))
                    thinking = "".join(event.text for event in piece.events if isinstance(event, Reasoning))
                    calls = piece.answer.tool_calls[num_calls : None if piece.completion.finish_reason else -1]
                    num_calls += len(calls)
                    logprobs = _logprobs(answering, piece.completion)
                    if text or thinking or calls or logprobs:
                        yield _line(self.part(text, thinking, calls, **logprobs, done=False))
        yield _line(self.part(**_end(answering)))


def _line(part: dict[str, Any]) -> bytes:
    return msgspec.json.encode(part) + b"\n"


def _logprobs(answering: Answering, completion: CompletionOutput) -> dict[str, Any]:
    logprobs = answering.logprobs(completion)
    return {"logprobs": logprobs["content"]} if logprobs and logprobs["content"] else {}


def _end(answering: Answering) -> dict[str, Any]:
    """How the answer ended, with counts of tokens and times in nanoseconds."""
    assert answering.output is not None
    assert answering.output.metrics is not None
    times, usage = answering.output.metrics, answering.meter.usage
    return {
        "done": True,
        "done_reason": "length" if answering.answers[0].finish_reason == "length" else "stop",
        "total_duration": round((times.last_token_ts - times.queued_ts) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage["prompt_tokens"],
        "prompt_eval_duration": round((times.first_token_ts - times.scheduled_ts) * 1e9),
        "eval_count": usage["completion_tokens"],
        "eval_duration": round((times.last_token_ts - times.first_token_ts) * 1e9),
    }


def _details(server: Server) -> dict[str, Any]:
    frontend = server.llm.frontend
    unknown = dict.fromkeys(("parent_model", "parameter_size", "quantization_level"), "")
    kind = "gguf" if frontend.directory.is_file() else "safetensors"
    return {**unknown, "format": kind, "family": frontend.model_type, "families": [frontend.model_type]}


@router.get("/api/tags", responses=_ANSWERS, response_model=None)
@router.get("/api/ps", responses=_ANSWERS, response_model=None)
async def list_models(request: Request) -> Response:
    """The models that can be used, and those that are loaded: they are the same."""
    server: Server = request.app.state.server
    path = server.llm.frontend.directory
    card = {
        "size": sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()) if file.is_file()),
        "modified_at": datetime.fromtimestamp(server.created, UTC).isoformat(),
        "expires_at": "9999-12-31T23:59:59Z",
        "details": _details(server),
        "context_length": server.llm.max_model_len,
    }
    cards = []
    for name in server.names:
        tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
        digest = hashlib.sha256(name.encode()).hexdigest()  # clients show its beginning
        cards.append({"name": tagged, "model": tagged, "digest": digest, **card})
    return json_response({"models": cards})


@router.post("/api/show", responses=_ANSWERS, response_model=None)
async def show(body: ShowRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    body.model = body.model or body.name
    body.accepted(server)
    frontend, details = server.llm.frontend, _details(server)
    family = details["family"]
    capabilities = {"completion": True, "tools": server.tool_parser, "thinking": frontend.reasoning}
    description = {
        "template": frontend.given_chat_template or frontend.tokenizer.chat_template or "",
        "details": details,
        "model_info": {"general.architecture": family, f"{family}.context_length": server.llm.max_model_len},
        "capabilities": [name for name, value in capabilities.items() if value],
        "modelfile": "",
        "parameters": "",
    }
    return json_response(description)


@router.get("/api/version", responses=answers(dict[str, str], dict[str, str]), response_model=None)
async def ollama_version() -> Response:
    return json_response({"version": OLLAMA_VERSION})
