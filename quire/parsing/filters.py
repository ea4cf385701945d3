"""Filters that change the thinking and the content of some models, but not their calls."""

from collections.abc import Callable

from quire.parsing.events import Content, Event, Parser, Reasoning
from quire.parsing.reader import Parsing, Reader, Steps

Kind = type[Reasoning] | type[Content]
Filter = Callable[[Reader, Kind], Steps[None]]  # reads a text, and adds events of this kind

_LINE_BREAKS = ("\\r\\n", "\\n", "\\r")
# Text in which a backslash is literal: code, formulas and tool calls
_VERBATIM = {"```": "```", "`": "`", "$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]", "<tool_call>": "</tool_call>"}
_CALLS = ("<|START_ACTION|>", "<|END_ACTION|>")
_LONGEST_SOURCES = 300  # characters


class Filtered:
    """A parser that filters its thinking and its content, each run separately."""

    def __init__(self, parser: Parser, filter: Filter) -> None:
        self._parser = parser
        self._filter = filter
        self._kind: Kind = Content
        self._text = Parsing(filter, Content)

    def feed(self, text: str) -> list[Event]:
        return self._filtered(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._filtered(self._parser.finish()) + self._text.finish()

    def _filtered(self, events: list[Event]) -> list[Event]:
        filtered: list[Event] = []
        for event in events:
            if not isinstance(event, Reasoning | Content):
                filtered.append(event)
                continue
            if type(event) is not self._kind:
                filtered += self._text.finish()
                self._kind = type(event)
                self._text = Parsing(self._filter, self._kind)
            filtered += self._text.feed(event.text)
        return filtered


def line_breaks(reader: Reader, kind: Kind) -> Steps[None]:
    """Converts the escapes (a backslash and a letter) that MiniCPM-V writes to line breaks. Double backslashes
    remain."""
    say = _adder(reader, kind)
    while marker := (yield from reader.until((*_LINE_BREAKS, *_VERBATIM, "\\\\"), say)):
        say("\n" if marker in _LINE_BREAKS else marker)
        if marker in _VERBATIM:
            say((yield from reader.until((_VERBATIM[marker],), say)) or "")
        elif marker == "\\\\":
            while (yield from reader.literal("\\")):
                say("\\")


def without_citations(reader: Reader, kind: Kind) -> Steps[None]:
    """Removes the markers around cited text of Command A: <co>cited</co: 0:[1,2]>."""
    say = _adder(reader, kind)
    begin, end = _CALLS
    while marker := (yield from reader.until(("<co>", "</co: ", begin), say)):
        if marker == begin:
            say(marker)
            say((yield from reader.until((end,), say)) or "")
        elif marker == "</co: ":
            if (yield from reader.before((">",), _LONGEST_SOURCES)):
                yield from reader.literal(">")
            else:
                say(marker)


def _adder(reader: Reader, kind: Kind) -> Callable[[str], None]:
    def add(text: str) -> None:
        if text:
            reader.events.append(kind(text))

    return add
