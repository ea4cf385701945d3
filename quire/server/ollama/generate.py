"""Ollama's API: POST /api/generate and /api/chat. Bodies become chat requests."""

import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from quire.engine.processor import Prompt
from quire.messages.outputs import CompletionOutput
from quire.parsing.events import Content, Reasoning
from quire.server.errors import ApiError, json_response
from quire.server.fields import Logprobs, Objects, TokenIds
from quire.server.generation import Call, Server
from quire.server.ollama.bodies import OPTIONS, KeptModel, OllamaRoute
from quire.server.ollama.lines import LineStream, line
from quire.server.ollama.messages import Images, OllamaMessage, OllamaMessages, openai_messages
from quire.server.ollama.templates import GO_TEMPLATE, is_go_template
from quire.server.protocol import ChatRequest
from quire.server.routing import stream_answers, validated
from quire.server.running_chat import FunctionCall, RunningChat

router = APIRouter(route_class=OllamaRoute)


class Generation(KeptModel):
    stream: bool | None = Field(None, description="Default: true.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a JSON schema.")
    think: bool | str | None = Field(None, description="Think before the answer; low, medium and high are degrees.")
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = Field(None, description="Only with logprobs.")

    def accepted(self, request: Request) -> str:
        name = super().accepted(request)
        server: Server = request.app.state.server
        if self.think and server.llm.frontend.reasoning is None:
            raise ApiError(400, f"think: the model {name!r} does not support thinking", param="think")
        return name

    def translated(self, messages: list[dict[str, Any]], template: str | None = None, **extra: Any) -> ChatRequest:
        """Return the chat request, with the defaults of a created model. template: from the request itself. Raises
        ApiError."""
        created = self.created
        options = {**(created.parameters if created else {}), **(self.options or {})}
        fields = {OPTIONS[name]: value for name, value in options.items() if name in OPTIONS}
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
        fields |= {"chat_template": template or (created.template if created else None), **extra}
        chat = validated(ChatRequest, {**fields, "model": self.model, "messages": messages})
        if template is None:
            chat.trust_template()
        return chat

    def begun(self, messages: Iterable[OllamaMessage]) -> list[dict[str, Any]]:
        """Return OpenAI's messages, preceded by the messages of a created model."""
        created = self.created
        if created is None:
            return list(openai_messages(messages))
        own = [OllamaMessage.model_validate(message) for message in created.messages]
        found = list(openai_messages([*own, *messages]))
        if created.system is None or found[0]["role"] == "system":
            return found
        return [{"role": "system", "content": created.system}, *found]


_PICTURE = re.compile(r"(messages\[\d+\])\.content\[\d+\]\.image_url")  # in translated requests


class GenerateRequest(Generation):
    prompt: str | None = None
    suffix: str | None = Field(None, description="Fill the gap before it, without the chat template.")
    images: Images | None = None
    system: str | None = None
    template: str | None = Field(None, description="A Jinja template, if the server trusts templates of requests.")
    context: TokenIds | None = Field(None, description="Of an earlier answer, to go on with its conversation.")
    raw: bool | None = Field(None, description="Continue the prompt as it is, without the chat template.")

    def unsupported(self) -> tuple[str, str] | None:
        without_template = next((name for name in ("raw", "suffix") if getattr(self, name)), None)
        if without_template and self.images:
            return "images", f"cannot be used with {without_template}: the chat template says where pictures are"
        if without_template and self.context:
            return "context", f"cannot be used with {without_template}"
        if self.images and self.context:
            return "context", "cannot be used with images; send the messages of the conversation to /api/chat"
        if self.template and is_go_template(self.template):
            return "template", GO_TEMPLATE
        return super().unsupported()

    def chat(self) -> ChatRequest:
        messages = [OllamaMessage(role="system", content=self.system)] if self.system else []
        messages.append(OllamaMessage(role="user", content=self.prompt, images=self.images))
        return self.translated(self.begun(messages), self.template or None)


class OllamaChatRequest(Generation):
    messages: OllamaMessages | None = None
    tools: Objects | None = None

    def chat(self, template: str | None = None) -> ChatRequest:
        return self.translated(self.begun(self.messages or ()), template, tools=self.tools or None)


_STREAM = stream_answers(dict[str, Any], dict[str, str], LineStream.media_type)


@router.post("/api/generate", responses=_STREAM, response_model=None)
async def answer_prompt(body: GenerateRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    uses_template = not (body.raw or body.suffix)
    suffix = body.suffix
    prompt = body.prompt
    reply = Reply(body.accepted(request), is_chat=False, has_context=uses_template)
    if not prompt:
        return await _load(reply, body, server)
    context = _checked(body.context or [], server)
    chat = await request.state.body.run(body.chat)
    del body  # it may be large
    if uses_template:
        return await reply.send(await _begin(request, chat, "gen", "images", context))
    call = Call(server, request, chat, "gen")
    limit = server.llm.processor.generation_config.get("max_new_tokens")
    prompts: list[Prompt] = [prompt]
    changes: dict[str, Any] = {}
    if suffix:
        fill = server.fill_in_middle
        if fill is None:
            message = "suffix: the tokenizer of this model has no tokens for prompts with a gap"
            raise ApiError(400, message, param="suffix")
        prompts = [await request.state.body.run(fill.prompt, prompt, suffix, True)]
        changes = {"stop_token_ids": fill.ends}
    await call.process(prompts, limit, True, "prompt", **changes)
    return await reply.send(RunningChat(call, chat))


@router.post("/api/chat", responses=_STREAM, response_model=None)
async def answer_chat(body: OllamaChatRequest, request: Request) -> Response:
    reply = Reply(body.accepted(request), is_chat=True)
    if not body.messages:
        return await _load(reply, body, request.app.state.server)
    chat = await request.state.body.run(body.chat)
    del body
    return await reply.send(await _begin(request, chat, "chat", r"\1.images"))


async def _load(reply: "Reply", body: Generation, server: Server) -> Response:
    """Answer a request without a prompt: load the model, or unload it if keep_alive is 0."""
    if body.kept_seconds == 0:
        await server.keep_alive.unload()
        return json_response(reply.part(done=True, done_reason="unload"))
    try:
        await server.keep_alive.begin()
    finally:
        server.keep_alive.end()
    return json_response(reply.part(done=True, done_reason="load"))


def _checked(context: list[int], server: Server) -> list[int]:
    """Raises ApiError for ids that are not tokens of the model."""
    size = server.llm.processor.vocab_size
    if wrong := next((token for token in context if token >= size), None):
        raise ApiError(400, f"context: {wrong} is no token of this model, which has {size}", param="context")
    return context


async def _begin(
    request: Request, chat: ChatRequest, prefix: str, images: str, context: Sequence[int] = ()
) -> RunningChat:
    """images: the name of the field with the pictures, for errors."""
    try:
        return await RunningChat.begin(request, chat, prefix, context)
    except ApiError as error:
        error.param = error.param and _PICTURE.sub(images, error.param)
        error.detail = _PICTURE.sub(images, error.detail)
        raise


@dataclass(frozen=True)
class Reply:
    """The response to a chat or a prompt. model: the name as the client wrote it. has_context: whether the response
    ends with the tokens of prompt and output, which clients can send to continue."""

    model: str
    is_chat: bool
    has_context: bool = False

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

    async def send(self, running_chat: RunningChat) -> Response:
        if running_chat.body.stream:
            return await LineStream.begin(
                self._stream(running_chat), running_chat.call.keep_alive_interval, line(self.part(done=False))
            )
        [answer] = await running_chat.collect()
        assert answer.completion is not None
        fields = {**_logprobs(running_chat, answer.completion), **_end(running_chat)}
        fields |= self._context(running_chat, answer.completion.token_ids)
        return json_response(self.part(answer.content or "", answer.reasoning, answer.tool_calls, **fields))

    async def _stream(self, running_chat: RunningChat) -> AsyncGenerator[bytes]:
        num_calls = 0  # calls sent so far, each when it is complete
        token_ids: list[int] = []
        async with aclosing(running_chat.pieces()) as steps:
            async for pieces in steps:
                for piece in pieces:
                    token_ids += piece.completion.token_ids if self.has_context else ()
                    text = "".join(event.text for event in piece.events if isinstance(event, Content))
                    thinking = "".join(event.text for event in piece.events if isinstance(event, Reasoning))
                    calls = piece.answer.tool_calls[num_calls : None if piece.completion.finish_reason else -1]
                    num_calls += len(calls)
                    logprobs = _logprobs(running_chat, piece.completion)
                    if text or thinking or calls or logprobs:
                        yield line(self.part(text, thinking, calls, **logprobs, done=False))
        yield line(self.part(**_end(running_chat), **self._context(running_chat, token_ids)))

    def _context(self, running_chat: RunningChat, token_ids: Sequence[int]) -> dict[str, Any]:
        assert running_chat.output is not None
        return {"context": [*running_chat.output.prompt_token_ids, *token_ids]} if self.has_context else {}


def _logprobs(running_chat: RunningChat, completion: CompletionOutput) -> dict[str, Any]:
    logprobs = running_chat.logprobs(completion)
    return {"logprobs": logprobs["content"]} if logprobs and logprobs["content"] else {}


def _end(running_chat: RunningChat) -> dict[str, Any]:
    """Return the finish reason, with token counts and times in nanoseconds."""
    assert running_chat.output is not None
    assert running_chat.output.metrics is not None
    times = running_chat.output.metrics
    usage = running_chat.meter.usage
    return {
        "done": True,
        "done_reason": "length" if running_chat.answers[0].finish_reason == "length" else "stop",
        "total_duration": round((times.last_token_ts - times.queued_ts) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage["prompt_tokens"],
        "prompt_eval_duration": round((times.first_token_ts - times.scheduled_ts) * 1e9),
        "eval_count": usage["completion_tokens"],
        "eval_duration": round((times.last_token_ts - times.first_token_ts) * 1e9),
    }
