"""The parser of a whole answer: its reasoning first, then tool calls in the rest."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.parsing.events import Content, Event, Parser, ToolArguments, ToolCall
from quire.parsing.forced import forced_calls
from quire.parsing.formats import TOOLS
from quire.parsing.reasoning import REASONING


def answer_parser(
    reasoning: str | None,
    tools: str | None,
    definitions: Sequence[Mapping[str, Any]] = (),
    *,
    starts_in_thinking: bool = False,
    tool_choice: str | Mapping[str, Any] = "auto",
    is_constrained: bool = False,
    is_promoted: bool = False,
) -> Parser | None:
    """Return the parser of one answer, None if all of its text is content.

    reasoning, tools: names in REASONING and TOOLS, None to skip the search for reasoning or tool calls.
    definitions: the request's tools.
    starts_in_thinking: ReasoningFormat.is_open of the prompt.
    tool_choice: as in the request; "none" disables calls.
    is_constrained: a grammar constrains the text after the thinking, starting only at the end marker.
    is_promoted: ReasoningFormat.is_promoted of the request.
    """
    thinking = REASONING[reasoning] if reasoning else None
    calls = TOOLS[tools] if tools and tool_choice == "auto" else None
    is_forced = tool_choice not in ("auto", "none")
    is_free = not is_constrained and not is_forced
    parsers: list[Parser] = []
    strays: tuple[str, ...] = ()
    if thinking:
        calls_end = is_free and (calls is not None or not thinking.ends_for_tools)
        strays = thinking.end if calls_end and thinking.implicit_ends else ()
        parsers.append(thinking.make(starts_in_thinking, calls_end, is_promoted and is_free, definitions))
    if is_forced:
        parsers.append(forced_calls(tool_choice))
    elif calls and not (calls.whole and thinking and thinking.whole):
        parsers.append(calls.make(definitions, strays))
    return _Chain(*parsers) if len(parsers) > 1 else parsers[0] if parsers else None


class _Chain:
    """Two parsers. The second reads the content that the first emits. Their calls are numbered together."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second
        self._indices: dict[tuple[bool, int], int] = {}  # (whether the second parser found it, its number) -> number

    def feed(self, text: str) -> list[Event]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Event]:
        return self._pass_on(self._first.finish()) + self._numbered(True, self._second.finish())

    def _pass_on(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                passed += self._numbered(True, self._second.feed(event.text))
            else:
                passed += self._numbered(False, [event])
        return passed

    def _numbered(self, is_second: bool, events: list[Event]) -> list[Event]:
        return [
            msgspec.structs.replace(event, index=self._indices.setdefault((is_second, event.index), len(self._indices)))
            if isinstance(event, ToolCall | ToolArguments)
            else event
            for event in events
        ]
