"""A chat request that runs. Every API for chats translates its bodies to ChatRequest, and these pieces to its own."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Self
from uuid import uuid4

from fastapi import Request

from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.server.generation import Call, Meter, Server
from quire.server.protocol import ChatRequest
from quire.text.parsing.events import Content, Event, Reasoning, ToolCall


@dataclass
class FunctionCall:
    """A tool call of an answer. arguments: JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """One completion of a chat, as far as it is known.

    reasoning, content: None as long as there is none. completion: its latest part, which is the whole completion if the
    request is not streamed.
    """

    index: int
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[FunctionCall] = field(default_factory=list)
    completion: CompletionOutput | None = None

    @property
    def finish_reason(self) -> str | None:
        """As of the completion, but "tool_calls" for an answer that ended by itself and has some."""
        reason = None if self.completion is None else self.completion.finish_reason
        return "tool_calls" if reason == "stop" and self.tool_calls else reason

    def add(self, completion: CompletionOutput, events: list[Event]) -> None:
        self.completion = completion
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning = (self.reasoning or "") + event.text
            elif isinstance(event, Content):
                self.content = (self.content or "") + event.text
            elif isinstance(event, ToolCall):
                self.tool_calls.append(FunctionCall(f"call_{uuid4().hex[:24]}", event.name))
            else:
                self.tool_calls[event.index].arguments += event.text


@dataclass(frozen=True)
class Piece:
    """The new part of one completion.

    events: of its text. completion: its tokens, their logprobs, how it ended. answer: all of it so far, with this part.
    """

    events: list[Event]
    completion: CompletionOutput
    answer: Answer


class Answering:
    """A chat request that runs.

    body.stream decides whether pieces come as tokens do, or once with the whole answer. answers: one for each of n, as
    far as they are known. output: what the engine reported last: the prompt's token ids and logprobs.
    """

    def __init__(self, call: Call, body: ChatRequest) -> None:
        self.call, self.body, self.meter = call, body, Meter()
        self.answers = [Answer(index) for index in range(body.n or 1)]
        self.output: RequestOutput | None = None

    @classmethod
    async def begin(cls, request: Request, body: ChatRequest, prefix: str) -> Self:
        """Render and tokenize the conversation. prefix: of the id of the response. Raises ApiError."""
        server: Server = request.app.state.server
        call = Call(server, request, body, prefix)
        default = server.llm.processor.generation_config.get("max_new_tokens")
        prompts = [await server.render(body.messages, body, request.state.body)]
        await call.process(prompts, default, bool(body.add_special_tokens), "messages")
        return cls(call, body)

    async def pieces(self) -> AsyncGenerator[list[Piece]]:
        """The parts of the answers, in the order in which they come. A list may be empty.

        Raises ApiError, EngineDeadError. To close the generator early aborts the request.
        """
        async with aclosing(self.call.run()) as outputs:
            async for output in outputs:
                self.output = output
                self.meter.add(output)
                yield [self._piece(completion) for completion in output.outputs]

    async def collect(self) -> list[Answer]:
        """The whole answers. Raises ApiError, EngineDeadError."""
        async with aclosing(self.pieces()) as pieces:
            async for _ in pieces:
                pass
        return self.answers

    def _piece(self, completion: CompletionOutput) -> Piece:
        answer = self.answers[completion.index]
        events: list[Event] = [Content(completion.text)] if completion.text else []
        answer.add(completion, events)
        return Piece(events, completion, answer)
