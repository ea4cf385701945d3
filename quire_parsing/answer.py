"""The parser of a whole answer: its reasoning first, and its tool calls in what is left."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire_parsing.events import Content, Event, Parser, ToolArguments, ToolCall
from quire_parsing.forced import forced_calls
from quire_parsing.formats import TOOLS
from quire_parsing.reasoning import REASONING


def answer_parser(
    reasoning: str | None,
    tools: str | None,
    definitions: Sequence[Mapping[str, Any]] = (),
    *,
    starts_in_thinking: bool = False,
    tool_choice: str | Mapping[str, Any] = "auto",
) -> Parser | None:
    """The parser of one answer, None if all of its text is content.

    reasoning, tools: names in REASONING and TOOLS, None for an answer whose reasoning or tool calls are not looked for
    definitions: the request's tools. starts_in_thinking: ReasoningFormat.is_open of the prompt
    tool_choice: as in the request; "none" looks for no calls
    """
    thinking = REASONING[reasoning] if reasoning else None
    calls = TOOLS[tools] if tools and tool_choice == "auto" else None
    parsers = [thinking.make(starts_in_thinking, tools=definitions)] if thinking else []
    if tool_choice not in ("auto", "none"):
        parsers.append(forced_calls(tool_choice))
    elif calls and not (calls.whole and thinking and thinking.whole):
        parsers.append(calls.make(definitions))
    return _Chain(*parsers) if len(parsers) > 1 else parsers[0] if parsers else None


class _Chain:
    """Two parsers. The second reads what is content for the first. Calls of both are numbered together."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first, self._second = first, second
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
