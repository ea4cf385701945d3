"""POST /v1/chat/completions"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.parsing.events import Content, Event, Reasoning, ToolCall
from quire.server.errors import ApiError, json_response
from quire.server.logprobs import prompt_logprobs
from quire.server.messages import text_of
from quire.server.protocol import ChatRequest
from quire.server.responses import AssistantMessage, ChatChoice, ChatResponse, ChatToolCall
from quire.server.routing import StrictRoute, stream_answers
from quire.server.running_chat import Answer, FunctionCall, Piece, RunningChat
from quire.server.streams import EventStream
from quire.server.usage import Chunks

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/chat/completions", responses=stream_answers(ChatResponse), response_model=None)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    if body.tools == []:
        raise ApiError(400, "tools should have at least one tool, or be left out", param="tools")
    running_chat = await RunningChat.begin(request, body, "chatcmpl")
    if body.stream:
        return await EventStream.begin(_stream(running_chat), running_chat.call.keep_alive_interval)
    answers = await running_chat.collect()
    choices = [_choice(running_chat, answer) for answer in answers]
    return json_response(
        running_chat.call.answer(
            "chat.completion", choices, running_chat.meter, **_prompt_keys(running_chat, whole=True)
        )
    )


async def _stream(running_chat: RunningChat) -> AsyncGenerator[bytes]:
    call = running_chat.call
    meter = running_chat.meter
    body = running_chat.body
    chunks = Chunks(call, call.head("chat.completion.chunk"))
    begun = False
    async with aclosing(running_chat.pieces()) as steps:
        async for pieces in steps:
            choices = [choice for piece in pieces for choice in _deltas(running_chat, piece)]
            events = []
            if not begun:
                begun = True
                indices = range(body.n or 1)
                extra = _prompt_keys(running_chat)
                for index in indices:
                    first = _delta(index, {"role": _role(running_chat), "content": ""})
                    events.append(chunks.event(first, meter, at_start=True, **extra))
                    extra = {}
                if echo := _echo(running_chat):
                    echoed = [_delta(index, {"content": echo}) for index in indices]
                    events += [chunks.event(choice, meter, at_start=True) for choice in echoed]
            events += [chunks.event(choice, meter) for choice in choices]
            if events:
                yield b"".join(events)
    if last := chunks.last(meter):
        yield last


def _prompt_keys(running_chat: RunningChat, whole: bool = False) -> dict[str, Any]:
    """Return the fields about the prompt, for a complete response or the first chunk of a stream."""
    output = running_chat.output
    body = running_chat.body
    assert output is not None
    places = None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs)
    return {
        "prompt_token_ids": output.prompt_token_ids if body.return_token_ids else None,
        "prompt_text": output.prompt if body.return_prompt_text else None,
        **({} if places is None and not whole else {"prompt_logprobs": places}),
    }


def _role(running_chat: RunningChat) -> str:
    """Return the role of the response: the last message's role if the prompt continues that message, as in vLLM."""
    body = running_chat.body
    return (
        body.messages[-1].role if body.add_generation_prompt is False else running_chat.call.server.config.response_role
    )


def _echo(running_chat: RunningChat) -> str:
    """Return the text that the response starts with: the last message, if `echo` is set and the roles match."""
    body = running_chat.body
    last = body.messages[-1]
    if not body.echo or last.role != _role(running_chat) or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(map(text_of, last.content))


def _choice(running_chat: RunningChat, answer: Answer) -> ChatChoice:
    """Return a choice of a complete response. Empty content is null if the model called tools by itself, or if its
    reasoning format is known; otherwise it is "", as in vLLM."""
    completion = answer.completion
    assert completion is not None
    content = _echo(running_chat) + (answer.content or "")
    may_be_null = answer.tool_calls or running_chat.call.server.llm.frontend.reasoning is not None
    empty = None if may_be_null and running_chat.body.forced_choice is None else ""
    message = AssistantMessage(
        role=_role(running_chat),
        content=content or empty,
        refusal=None,
        annotations=None,
        audio=None,
        function_call=None,
        reasoning=answer.reasoning,
    )
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls and running_chat.body.answers_functions:
        message["function_call"] = _function_call(answer.tool_calls[0])
    elif answer.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in answer.tool_calls]
    return ChatChoice(
        index=answer.index,
        message=message,
        logprobs=running_chat.logprobs(completion),
        finish_reason=_finish_reason(running_chat, answer),
        stop_reason=completion.stop_reason,
        token_ids=completion.token_ids if running_chat.body.return_token_ids else None,
        routed_experts=None,
        weight_versions=None,
    )


def _deltas(running_chat: RunningChat, piece: Piece) -> list[dict[str, Any]]:
    """Return a chunk's choice for each event of a piece. The first has the logprobs and token ids, the last has the
    finish reason."""
    completion = piece.completion
    body = running_chat.body
    answer = piece.answer
    deltas = [_delta(answer.index, _event_delta(event, answer, body.answers_functions)) for event in piece.events]
    if not deltas and (completion.finish_reason or body.logprobs or body.return_token_ids):
        deltas = [_delta(answer.index, {} if answer.tool_calls else {"content": ""})]
    if deltas:
        deltas[0]["logprobs"] = running_chat.logprobs(completion)
        for delta in deltas:
            delta["token_ids"] = None
        deltas[0]["token_ids"] = completion.token_ids if body.return_token_ids else None
        if completion.finish_reason is not None:
            deltas[-1] |= {"finish_reason": _finish_reason(running_chat, answer), "stop_reason": completion.stop_reason}
    return deltas


def _event_delta(event: Event, answer: Answer, as_function: bool) -> dict[str, Any]:
    if isinstance(event, Reasoning):
        return {"reasoning": event.text, "reasoning_content": event.text}
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, ToolCall):  # as with OpenAI, the name comes first, then the arguments in pieces
        if as_function:
            return {"function_call": {"name": event.name, "arguments": ""}}
        begun = answer.tool_calls[event.index]
        call = _tool_call(FunctionCall(begun.id, event.name, begun.is_custom))
        return {"tool_calls": [{"index": event.index, **call}]}
    if as_function:
        return {"function_call": {"arguments": event.text}}
    if answer.tool_calls[event.index].is_custom:
        return {"tool_calls": [{"index": event.index, "custom": {"input": event.text}}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _finish_reason(running_chat: RunningChat, answer: Answer) -> str | None:
    """Return "stop" instead of "tool_calls" if the request named the tool, like OpenAI and vLLM."""
    reason = answer.finish_reason
    if reason != "tool_calls":
        return reason
    if running_chat.body.named_tool is not None:
        return "stop"
    return "function_call" if running_chat.body.answers_functions else reason


def _tool_call(call: FunctionCall) -> ChatToolCall:
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _function_call(call: FunctionCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
