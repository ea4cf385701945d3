"""Line breaks that a model writes as a backslash and a letter, as MiniCPM-V does."""

from quire_parsing.events import Content, Event, Parser, Reasoning
from quire_parsing.reader import Parsing, Reader, Steps

_LINE_BREAKS = ("\\r\\n", "\\n", "\\r")
# Text in which a backslash is one: code, formulas and tool calls
_VERBATIM = {"```": "```", "`": "`", "$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]", "<tool_call>": "</tool_call>"}


class WithLineBreaks:
    """A parser whose thinking and content have the line breaks that their model means."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._kind: type[Reasoning] | type[Content] = Content
        self._text = Parsing(_read, Content)

    def feed(self, text: str) -> list[Event]:
        return self._recovered(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._recovered(self._parser.finish()) + self._text.finish()

    def _recovered(self, events: list[Event]) -> list[Event]:
        recovered: list[Event] = []
        for event in events:
            if not isinstance(event, Reasoning | Content):
                recovered.append(event)
                continue
            if type(event) is not self._kind:
                recovered += self._text.finish()
                self._kind = type(event)
                self._text = Parsing(_read, self._kind)
            recovered += self._text.feed(event.text)
        return recovered


def _read(reader: Reader, kind: type[Reasoning] | type[Content]) -> Steps[None]:
    """Reads thinking or content. A backslash behind another one stays what it is."""

    def say(text: str) -> None:
        reader.events.append(kind(text))

    while marker := (yield from reader.until((*_LINE_BREAKS, *_VERBATIM, "\\\\"), say)):
        say("\n" if marker in _LINE_BREAKS else marker)
        if marker in _VERBATIM:
            say((yield from reader.until((_VERBATIM[marker],), say)) or "")
        elif marker == "\\\\":
            while (yield from reader.literal("\\")):
                say("\\")
