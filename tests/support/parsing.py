"""Answers, parsed: the joined events, and splits of texts."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import msgspec

from quire.parsing.events import Content, Event, Parser, Reasoning, ToolArguments, ToolCall


class Parsed(msgspec.Struct):
    """The events of an answer, joined. order: the kinds of the events, each run once; calls: (name, arguments)."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = []
    ids: list[str | None] = []
    order: list[str] = []


def parts_of(text: str, cuts: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def parse(make: Callable[[], Parser], parts: Sequence[str]) -> Parsed:
    parser = make()
    parsed = Parsed(calls=[], ids=[], order=[])
    events: list[Event] = [event for part in parts for event in parser.feed(part)]
    for event in events + parser.finish():
        kind = type(event).__name__
        match event:
            case Reasoning():
                parsed.reasoning += event.text
            case Content():
                parsed.content += event.text
            case ToolCall():
                assert event.index == len(parsed.calls)
                parsed.calls.append((event.name, ""))
                parsed.ids.append(event.id)
            case ToolArguments():
                assert event.index == len(parsed.calls) - 1
                name, arguments = parsed.calls[event.index]
                parsed.calls[event.index] = (name, arguments + event.text)
        if getattr(event, "text", "call") and (kind == "ToolCall" or parsed.order[-1:] != [kind]):
            parsed.order.append(kind)
    return parsed
