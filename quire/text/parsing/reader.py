"""Reads the text of an answer while it arrives.

A parser is a generator over a Reader. It reads the text in order, as if all of it were known; where the next text is
needed and has not arrived, the Reader's methods yield, and the parser goes on with the next feed.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, TypeVar

from quire.text.parsing.events import Content, Event, ToolArguments, ToolCall

Value = TypeVar("Value")
Steps = Generator[None, None, Value]

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[\w.-]{0,256}")
_SCALAR = re.compile(r"""[^\s,:;(){}\[\]<"']*""")
_STRUCTURE = re.compile(r"""["'(){}\[\]<]""")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


@lru_cache(maxsize=256)
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """(any of the markers, a part of one at the end of the text, length of the longest such part)"""
    parts = {marker[:length] for marker in markers for length in range(1, len(marker))}

    def any_of(texts: set[str]) -> str:
        return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"

    return re.compile(any_of(set(markers))), re.compile(rf"(?:{any_of(parts)})\Z"), max(map(len, parts), default=0)


class Reader:
    """The text of an answer that has arrived and has not been read, and the events of the text that has been.

    Where two markers begin at the same character, the longer one counts. is_complete: no more text will arrive.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_complete = False
        self.num_calls = 0
        self._text = ""
        self._position = 0
        self._attempt: list[str] | None = None  # the text of what may become a call
        self._blank: list[str] | None = []  # content so far, as long as it is white space that a call would discard

    def add(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    # Events

    def content(self, text: str) -> None:
        """Adds content. White space alone before, between or behind calls is not content."""
        if self._blank is not None:
            self._blank.append(text)
            if not text.strip():
                return
            text = "".join(self._blank)
            self._blank = None
        if text:
            self.events.append(Content(text))

    def hold(self, marker: str) -> None:
        """Adds a marker that is content if no call follows it."""
        if self._blank is None:
            self._blank = []
        self._blank.append(marker)

    def attempt(self, marker: str) -> None:
        """Begins what may become a call: all text from here on is remembered."""
        self._attempt = [marker]

    @property
    def is_attempting(self) -> bool:
        return self._attempt is not None

    def release(self) -> str:
        """Ends the attempt, if there is one. Returns its text; "" if it has become a call."""
        text = "".join(self._attempt or ())
        self._attempt = None
        return text

    def give_up(self) -> None:
        """Ends the attempt: what has become no call is content."""
        if text := self.release():
            self.content(text)

    def call(self, name: str, id: str | None = None) -> None:
        """The attempt is a call."""
        self._attempt = None
        self._blank = []
        self.events.append(ToolCall(self.num_calls, name, id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds a piece of the arguments of the current call."""
        if text:
            self.events.append(ToolArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """Ends the answer: white space that was held back is content if the answer has no calls."""
        if self._blank and (not self.num_calls or "".join(self._blank).strip()):
            self.events.append(Content("".join(self._blank)))

    # Text

    def until(self, markers: tuple[str, ...], say: Callable[[str], None]) -> Steps[str | None]:
        """Says the text before the next marker as it arrives, and reads the marker. None at the end of the text."""
        while True:
            start, marker = self._find(markers)
            if start > self._position:
                say(self._take(start))
            if marker:
                self._take(start + len(marker))
                return marker
            if self.is_complete:
                return None
            yield

    def unread(self, marker: str) -> str:
        """Takes back the last character of a marker that was just read. Returns the rest of the marker."""
        self._position -= 1
        return marker[:-1]

    def before(self, markers: tuple[str, ...], limit: int) -> Steps[tuple[str, str] | None]:
        """The text before the next marker, and the marker, which is not read. None, and nothing is read, if that text
        is longer than the limit."""
        while True:
            start, marker = self._find(markers)
            if start - self._position > limit or (self.is_complete and not marker):
                return None
            if marker:
                return self._take(start), marker
            yield

    def space(self) -> Steps[str]:
        """Reads white space. Returns the character behind it, which is not read; "" at the end of the text."""
        while True:
            match = _SPACE.match(self._text, self._position)
            self._take(match.end() if match else self._position)
            if self._position < len(self._text) or self.is_complete:
                return self._text[self._position : self._position + 1]
            yield

    def word(self) -> Steps[str]:
        """Reads the name of a function or a parameter, up to 256 characters; "" if something else follows."""
        while True:
            match = _WORD.match(self._text, self._position)
            end = match.end() if match else self._position
            if end < len(self._text) or self.is_complete:
                return self._take(end)
            yield

    def literal(self, text: str) -> Steps[bool]:
        """Reads a text if it is what follows."""
        while not self.is_complete and len(self._text) - self._position < len(text):
            if not text.startswith(self._text[self._position :]):
                return False
            yield
        if self._text.startswith(text, self._position):
            self._take(self._position + len(text))
            return True
        return False

    def value(self, say: Callable[[str], None]) -> Steps[bool]:
        """Reads a value of JSON or Python, and says its text as it arrives. Whether it is complete.

        Only strings and brackets are looked at. A "<" outside of strings ends a broken value: a marker follows.
        """
        depth = 0
        quote = ""
        is_escaped = False
        is_scalar = False
        while True:
            index = self._position
            is_complete: bool | None = None
            while is_complete is None and index < len(self._text):
                if is_escaped:
                    is_escaped = False
                    index += 1
                elif quote:
                    match = _IN_STRING[quote].search(self._text, index)
                    index = match.end() if match else len(self._text)
                    is_escaped = bool(match and match[0] == "\\")
                    if match and not is_escaped:
                        quote = ""
                        is_complete = True if depth == 0 else None
                elif depth == 0 and (is_scalar or self._text[index] not in "\"'([{"):
                    match = _SCALAR.match(self._text, index)
                    end = match.end() if match else index
                    if end < len(self._text):
                        is_complete = is_scalar or end > index
                    is_scalar = is_scalar or end > index
                    index = end
                else:
                    match = _STRUCTURE.search(self._text, index)
                    index = match.end() if match else len(self._text)
                    found = match[0] if match else ""
                    if found == "<":
                        index -= 1
                        is_complete = False
                    elif found in ('"', "'"):
                        quote = found
                    elif found:
                        depth += 1 if found in "([{" else -1
                        is_complete = True if depth == 0 else None
            if index > self._position:
                say(self._take(index))
            if is_complete is not None:
                return is_complete
            if self.is_complete:
                return is_scalar
            yield

    def _find(self, markers: tuple[str, ...]) -> tuple[int, str]:
        """(position up to which the text holds no marker, the marker that begins there, or "" if none is complete)"""
        complete, part, length = _patterns(markers)
        match = complete.search(self._text, self._position)
        if not self.is_complete:
            # A longer marker may begin at the same character, or another one before it.
            partial = part.search(self._text, max(self._position, len(self._text) - length))
            if partial and not (match and match.start() < partial.start()):
                return partial.start(), ""
        return (match.start(), match[0]) if match else (len(self._text), "")

    def _take(self, end: int) -> str:
        text = self._text[self._position : end]
        self._position = end
        if text and self._attempt is not None:
            self._attempt.append(text)
        return text


class Parsing:
    """The Parser that runs a generator."""

    def __init__(self, parse: Callable[..., Steps[None]], *arguments: Any) -> None:
        self._reader = Reader()
        self._steps = parse(self._reader, *arguments)
        next(self._steps, None)

    def feed(self, text: str) -> list[Event]:
        return self._advance(text)

    def finish(self) -> list[Event]:
        self._reader.is_complete = True
        return self._advance("")

    def _advance(self, text: str) -> list[Event]:
        reader = self._reader
        reader.add(text)
        next(self._steps, None)
        events, reader.events = reader.events, []
        return events
