"""POST /v1/chat/completions"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.server.errors import json_response
from quire.server.generation import Call, Chunks, EventStream, Meter, Server
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.messages import text_of
from quire.server.protocol import ChatRequest
from quire.server.responses import AssistantMessage, ChatChoice, ChatLogprobs, ChatResponse
from quire.server.routing import StrictRoute, stream_answers

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/chat/completions", responses=stream_answers(ChatResponse), response_model=None)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    call = Call(server, request, body, "chatcmpl")
    default = server.llm.processor.generation_config.get("max_new_tokens")
    prompts = [await server.render(body.messages, body, request.state.body)]
    await call.process(prompts, default, bool(body.add_special_tokens), "messages")
    del prompts  # with truncate_prompt_tokens they can be much longer than what remains of them
    if body.stream:
        return await EventStream.begin(_stream(call, body))
    return json_response(await _collect(call, body))


async def _collect(call: Call, body: ChatRequest) -> dict[str, Any]:
    meter = Meter()
    async with aclosing(call.run()) as outputs:
        output = await anext(outputs)
    meter.add(output)
    choices, role, echo = [], _role(call, body), _echo(call, body)
    for completion in output.outputs:
        message = AssistantMessage(
            role=role,
            content=echo + completion.text,
            refusal=None,
            annotations=None,
            audio=None,
            function_call=None,
            reasoning=None,
        )
        choice = ChatChoice(
            index=completion.index,
            message=message,
            logprobs=_logprobs(call, body, completion),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if body.return_token_ids else None,
            routed_experts=None,
            weight_versions=None,
        )
        choices.append(choice)
    places = output.prompt_logprobs
    return call.answer(
        "chat.completion",
        choices,
        meter,
        prompt_logprobs=None if places is None else prompt_logprobs(places),
        **_prompt_keys(body, output),
    )


async def _stream(call: Call, body: ChatRequest) -> AsyncGenerator[bytes]:
    chunks, meter, begun = Chunks(call, "chat.completion.chunk"), Meter(), False
    async with aclosing(call.run()) as outputs:
        async for output in outputs:
            events = []
            if not begun:
                extra = _prompt_keys(body, output)
                if output.prompt_logprobs is not None:
                    extra["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
                for index in range(body.n or 1):
                    events.append(chunks.event(_text_choice(index, role=_role(call, body), content=""), meter, **extra))
                    extra = {}
                if echo := _echo(call, body):
                    events += [chunks.event(_text_choice(index, content=echo), meter) for index in range(body.n or 1)]
                begun = True
            meter.add(output)
            for completion in output.outputs:
                if completion.text or completion.finish_reason or body.logprobs or body.return_token_ids:
                    events.append(chunks.event(_delta(call, body, completion), meter))
            if events:
                yield b"".join(events)
    if last := chunks.last(meter):
        yield last


def _prompt_keys(body: ChatRequest, output: RequestOutput) -> dict[str, Any]:
    """The fields about the prompt, in a complete response and in the first chunk of a stream."""
    return {
        "prompt_token_ids": output.prompt_token_ids if body.return_token_ids else None,
        "prompt_text": output.prompt if body.return_prompt_text else None,
    }


def _role(call: Call, body: ChatRequest) -> str:
    """The role of the answer: the last message's role if the prompt continues that message, as in vLLM."""
    return body.messages[-1].role if body.add_generation_prompt is False else call.server.config.response_role


def _echo(call: Call, body: ChatRequest) -> str:
    """What the answer begins with: the text of the last message, if that was asked for and has the answer's role."""
    last = body.messages[-1]
    if not body.echo or last.role != _role(call, body) or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(map(text_of, last.content))


def _text_choice(index: int, **delta: str) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(call: Call, body: ChatRequest, completion: CompletionOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": completion.index,
        "delta": {"content": completion.text},
        "logprobs": _logprobs(call, body, completion),
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids if body.return_token_ids else None,
    }
    if completion.finish_reason is not None:
        choice["stop_reason"] = completion.stop_reason
    return choice


def _logprobs(call: Call, body: ChatRequest, completion: CompletionOutput) -> ChatLogprobs | None:
    if completion.logprobs is None:
        return None
    token_bytes = call.server.llm.get_tokenizer().token_bytes
    count = None if body.logprob_token_ids else body.top_logprobs or 0
    return chat_logprobs(completion.token_ids, completion.logprobs, count, call.tokens_as_ids, token_bytes)
