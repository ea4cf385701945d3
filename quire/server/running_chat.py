"""A running chat request. Every chat API translates its bodies to ChatRequest, and these pieces to its own format."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from uuid import uuid4

from fastapi import Request
from pydantic_core import from_json

from quire.engine.processor import Prompt
from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.parsing.answer import answer_parser
from quire.parsing.events import Content, Event, Parser, Reasoning, ToolArguments, ToolCall
from quire.parsing.forced import forced_calls_schema
from quire.parsing.formats import TOOLS
from quire.parsing.reasoning import REASONING
from quire.parsing.strict import STRICT
from quire.server.custom_tools import CustomInputs
from quire.server.errors import ApiError
from quire.server.generation import Call, Server
from quire.server.logprobs import chat_logprobs
from quire.server.protocol import ChatRequest
from quire.server.responses import ChatLogprobs

PROMPT_END = 256  # last characters of a prompt, which show whether the output begins with thinking


@dataclass
class FunctionCall:
    """A tool call in an output. is_custom: it calls a custom tool. pieces: the pieces of its arguments (JSON text) or
    of a custom tool's input."""

    id: str
    name: str
    is_custom: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    @property
    def argument_object(self) -> dict[str, Any]:
        """Return the arguments as an object; if they were cut off, the part that can be parsed."""
        try:
            value = from_json(self.arguments or "{}", allow_partial=True)
        except ValueError:
            value = self.arguments
        return value if isinstance(value, dict) else {"arguments": value}


@dataclass(frozen=True)
class CallIds:
    """Ids for tool calls without an id from the model: nine letters and digits, as Mistral's chat template requires, or
    the format that the model's own chat template requires.

    form: ToolFormat.ids. num_earlier: the number of calls in the conversation
    """

    form: str = ""
    num_earlier: int = 0

    def make(self, name: str, index: int) -> str:
        return self.form.format(name=name, index=self.num_earlier + index) if self.form else uuid4().hex[:9]


_ANY_IDS = CallIds()


@dataclass
class Answer:
    """One completion of a chat, as generated so far.

    completion: its latest part, or the whole completion if the request is not streamed. custom_names: the custom tools
    that it may call.
    """

    index: int
    ids: CallIds = _ANY_IDS
    custom_names: frozenset[str] = frozenset()
    texts: dict[type[Event], list[str]] = field(default_factory=lambda: defaultdict(list))  # pieces by type
    tool_calls: list[FunctionCall] = field(default_factory=list)
    completion: CompletionOutput | None = None

    @property
    def reasoning(self) -> str | None:
        """None as long as there is none."""
        return "".join(self.texts[Reasoning]) if Reasoning in self.texts else None

    @property
    def content(self) -> str | None:
        """None as long as there is none."""
        return "".join(self.texts[Content]) if Content in self.texts else None

    @property
    def finish_reason(self) -> str | None:
        """The completion's finish reason, or "tool_calls" if it ended by itself and has tool calls."""
        reason = None if self.completion is None else self.completion.finish_reason
        return "tool_calls" if reason == "stop" and self.tool_calls else reason

    def add(self, completion: CompletionOutput, events: list[Event]) -> None:
        self.completion = completion
        for event in events:
            if isinstance(event, Reasoning | Content):
                self.texts[type(event)].append(event.text)
            elif isinstance(event, ToolCall):
                id = event.id or self.ids.make(event.name, event.index)
                self.tool_calls.append(FunctionCall(id, event.name, event.name in self.custom_names))
            else:
                self.tool_calls[event.index].pieces.append(event.text)


@dataclass(frozen=True)
class Piece:
    """The new part of one completion.

    events: the events of its text. completion: its tokens, logprobs and finish reason. answer: everything so far,
    including this part.
    """

    events: list[Event]
    completion: CompletionOutput
    answer: Answer


class RunningChat:
    """A running chat request. body.stream decides whether pieces arrive with each token, or once with the whole output.
    answers: one for each of n, as generated so far. output: the engine's latest output, with the prompt's token ids and
    logprobs.
    """

    def __init__(
        self,
        call: Call,
        body: ChatRequest,
        parsers: Sequence[Parser] = (),
        is_forced: bool = False,
        custom_names: frozenset[str] = frozenset(),
        ids: CallIds = _ANY_IDS,
    ) -> None:
        """parsers: one for each of n outputs; empty if their texts are plain content. is_forced: the outputs must
        consist of calls. custom_names: the custom tools that they may call."""
        self.call, self.body, self.meter = call, body, call.meter()
        self._is_forced = is_forced
        self.answers = [Answer(index, ids, custom_names) for index in range(body.n or 1)]
        self.output: RequestOutput | None = None
        self._parsers = parsers

    @classmethod
    async def begin(cls, request: Request, body: ChatRequest, prefix: str, before: Sequence[int] = ()) -> Self:
        """Render and tokenize the conversation. prefix: the prefix of the response id. before: tokens to insert before
        those of the conversation, which must not have media then. Raises ApiError."""
        server: Server = request.app.state.server
        call = Call(server, request, body, prefix)
        tools = body.definitions
        choice = body.forced_choice
        custom_names = body.custom_names
        reasoning = server.llm.frontend.reasoning
        tool_parser = server.tool_parser if tools else None
        custom = body.forced_custom_tool
        strict = None
        if custom is not None:
            changes: dict[str, Any] = {"structured_outputs": custom.constraint}
        else:
            strict = _strict_calls(server, body, tools, choice or "auto")
            changes = _constraint_of_calls(body, tools, choice, strict, tool_parser)
        ids = _ANY_IDS
        if choice is not None and tool_parser is not None:
            num_earlier = sum(len(message.tool_calls or ()) for message in body.messages)
            ids = CallIds(TOOLS[tool_parser].ids, num_earlier)
        is_constrained = body.constraint is not None and body.constraint.structural_tag is None
        if is_constrained:
            tool_parser = None  # a constrained text contains no calls, even if it looks like one
        of_calls = TOOLS[tool_parser] if tool_parser and (choice is None or strict) else None
        of_thinking = REASONING[reasoning] if reasoning else None
        if any(format is not None and format.needs_special_tokens for format in (of_calls, of_thinking)):
            changes["skip_special_tokens"] = False
        media = await server.load_media(body.messages, body.mm_processor_kwargs, request.state.body)
        prompt = await server.render(body.messages, body, request.state.body, media)
        is_thinking = of_thinking is not None and of_thinking.is_open(prompt[-PROMPT_END:])
        template_arguments = server.llm.config.model.default_chat_template_kwargs | (body.chat_template_kwargs or {})
        is_promoted = of_thinking is not None and of_thinking.is_promoted(template_arguments)
        default = server.llm.processor.generation_config.get("max_new_tokens")
        field = None if choice is None and strict is None else "tools"
        special = bool(body.add_special_tokens)
        prompts: list[Prompt] = [prompt if media is None else media.prompt(prompt)]
        if before:
            prompts = [[*before, *await request.state.body.run(server.llm.get_tokenizer().encode, prompt, special)]]
        del prompt  # with truncate_prompt_tokens, it can be much longer than the tokens
        await call.process(prompts, default, special, "messages", field, **changes)
        begins_at_marker = is_constrained or (strict is not None and choice is not None)
        make = partial(
            answer_parser,
            reasoning,
            tool_parser,
            tools,
            starts_in_thinking=is_thinking,
            is_constrained=begins_at_marker,
            is_promoted=is_promoted,
        )
        read_as = "auto" if choice is None or strict else choice
        made = [make(tool_choice=read_as) for _ in range(body.n or 1)]
        parsers: list[Parser] = [parser for parser in made if parser is not None]
        if custom_names and custom is None:
            parsers = [CustomInputs(parser, custom_names) for parser in parsers]
        return cls(call, body, parsers, choice is not None, custom_names, ids)

    async def pieces(self) -> AsyncGenerator[list[Piece]]:
        """Yield the parts of the outputs in the order of arrival. A list may be empty.

        Raises ApiError, EngineDeadError. Closing the generator early aborts the request.
        """
        async with aclosing(self.call.run()) as outputs:
            async for output in outputs:
                self.output = output
                self.meter.add(output)
                yield [await self._piece(completion) for completion in output.outputs]

    async def collect(self) -> list[Answer]:
        """Return the complete outputs. Raises ApiError, EngineDeadError."""
        async with aclosing(self.pieces()) as pieces:
            async for _ in pieces:
                pass
        return self.answers

    def logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        """Return the logprobs of a completion's tokens, or of its new part, if the request asked for them."""
        if completion.logprobs is None:
            return None
        token_bytes = self.call.server.llm.get_tokenizer().token_bytes
        count = None if self.body.logprob_token_ids else self.body.top_logprobs or 0
        return chat_logprobs(completion.token_ids, completion.logprobs, count, self.call.tokens_as_ids, token_bytes)

    async def _piece(self, completion: CompletionOutput) -> Piece:
        answer = self.answers[completion.index]
        events: list[Event] = [Content(completion.text)] if completion.text else []
        if self._parsers:
            parser = self._parsers[completion.index]
            parsed = parser.feed(completion.text) + (parser.finish() if completion.finish_reason else [])
            events = _merged(event for event in parsed if self._is_wanted(event))
        num_calls = len(answer.tool_calls)
        answer.add(completion, events)
        if self.call.trace is not None:
            for call in answer.tool_calls[num_calls:]:
                self.call.trace.called(call.name, call.id, completion.index)
        if completion.finish_reason and answer.reasoning:
            encode = self.call.server.llm.get_tokenizer().encode
            # In a thread, since encoding long thinking takes a fraction of a second, which would stall other streams.
            self.meter.reasoning_tokens += len(await asyncio.to_thread(encode, answer.reasoning, False))
        return Piece(events, completion, answer)

    def _is_wanted(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self.body.include_reasoning is not False
        if isinstance(event, Content):  # where calls are forced, content is a call that was cut off
            return not self._is_forced
        return event.index == 0 or self.body.parallel_tool_calls is not False


def _constraint_of_calls(
    body: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    strict: str | None,
    tool_parser: str | None,
) -> dict[str, Any]:
    """Add the constraint that forces or restricts tool calls to the sampling parameters, if there is one. strict: see
    `_strict_calls`. Raises ApiError for tools whose calls could not be distinguished from text."""
    if strict is not None:
        return {"structured_outputs": {"structural_tag": strict}}
    if choice is not None:
        schema = forced_calls_schema(tools, choice, body.parallel_tool_calls is not False)
        return {"structured_outputs": {"json": schema}}
    if tools and tool_parser is None:
        message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        raise ApiError(400, f"tools: {message}: this model's chat template tells no format of calls", param="tools")
    return {}


def _strict_calls(
    server: Server, body: ChatRequest, tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]
) -> str | None:
    """Return the structural tag that lets the model call only these tools, in its own format. None without strict
    tools, for formats without a tag, and if another constraint applies."""
    form = STRICT.get(server.tool_parser or "")
    backend = server.llm.config.sampling.structured_outputs_config.get("backend", "auto")
    if form is None or not tools or body.constraint is not None or backend == "outlines":
        return None
    level = server.config.tool_strict_level
    tag = form.tag(tools, choice, body.parallel_tool_calls is not False, level)
    return None if tag is None else json.dumps(tag)


def _merged(events: Iterable[Event]) -> list[Event]:
    """Merge neighbouring pieces of the same text."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, ToolArguments) and isinstance(last, ToolArguments) and event.index == last.index:
            merged[-1] = ToolArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
