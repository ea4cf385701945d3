"""Reads the text of an answer as it arrives.

A parser is a generator over a Reader. It reads the text in order, as if all of it were available. When more text is
needed, the Reader's methods yield, and the parser resumes with the next feed.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, TypeVar

from quire.parsing.events import Content, Event, ToolArguments, ToolCall

Value = TypeVar("Value")
Steps = Generator[None, None, Value]

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[\w.-]{0,256}")
_STRUCTURE = re.compile(r"""["'(){}\[\]<`]""")
_END_OF_SCALAR = re.compile(r"""[\s,:;"'(){}\[\]<`]""")
_IN_STRING = {quote: re.compile(rf"\\(?:.|\Z)|{quote}", re.DOTALL) for quote in "\"'"}


@lru_cache(maxsize=256)
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """(any of the markers, a part of one at the end of the text, length of the longest such part)"""
    parts = {marker[:length] for marker in markers for length in range(1, len(marker))}

    def any_of(texts: set[str]) -> str:
        return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"

    return re.compile(any_of(set(markers))), re.compile(rf"(?:{any_of(parts)})\Z"), max(map(len, parts), default=0)


class Reader:
    """The received text of an answer that has not been read yet, and the events of the text that has been read.

    is_complete: no more text will arrive. is_attempt: the text being read may be a call; until that is decided, it is
    held back. If two markers begin at the same character, the longer one is used.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_complete = False
        self.is_attempt = False
        self.num_calls = 0
        self._text = ""
        self._position = 0
        self._held: list[str] | None = []  # text that is content if no call follows, or None: content is not held back

    def add(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    # Events

    def content(self, text: str) -> None:
        """Adds content. Text before, between or after calls is not content if it consists of white space."""
        if self._held is not None:
            self._held.append(text)
            if not text.strip():
                return
            text = "".join(self._held)
            self._held = None
        self.events.append(Content(text))

    def hold(self, marker: str, is_attempt: bool) -> None:
        """Holds back a marker and, if it begins an attempt, all text that is read after it."""
        self._held = self._held or []
        self._held.append(marker)
        self.is_attempt = is_attempt

    def give_up(self) -> None:
        """Ends the attempt. If it has not become a call, its text is content."""
        if self.is_attempt and self._held:
            text = "".join(self._held)
            self._held = []
            self.content(text)
        self.is_attempt = False

    def discard(self) -> None:
        """Discards the held-back text, which was the beginning of a call or a message."""
        self.is_attempt = False
        self._held = []

    def call(self, name: str, id: str | None = None) -> None:
        """Adds a call."""
        self.discard()
        self.events.append(ToolCall(self.num_calls, name, id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds a piece of the arguments of the latest call."""
        if text:
            self.events.append(ToolArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """Ends the answer."""
        text = "".join(self._held or ())
        if text.strip() or (text and not self.num_calls):
            self.events.append(Content(text))

    # Text

    def until(self, markers: tuple[str, ...], say: Callable[[str], None]) -> Steps[str | None]:
        """Streams the text before the next marker, and reads the marker. Returns None at the end of the text."""
        while True:
            start, marker = self._find(markers)
            if start > self._position:
                say(self._take(start))
            if marker or self.is_complete:
                return self._take(start + len(marker)) or None
            yield

    def before(self, markers: tuple[str, ...], limit: int) -> Steps[tuple[str, str] | None]:
        """Reads the text before the next marker, and returns it with the marker, which is not read. Returns None and
        reads nothing if the text is longer than the limit."""
        searched = 0
        while True:
            start, marker = self._find(markers, searched)
            if start - self._position > limit or (self.is_complete and not marker):
                return None
            if marker:
                return self._take(start), marker
            searched = start - self._position
            yield

    def literal(self, text: str) -> Steps[bool]:
        """Reads a text if it comes next."""
        found = yield from self.before((text,), 0)
        return bool(found and self._take(self._position + len(text)))

    def word(self) -> Steps[str]:
        """Reads the name of a function or a parameter, up to 256 characters. Returns "" if no name follows."""
        while True:
            match = _WORD.match(self._text, self._position)
            if self.is_complete or (match and match.end() < len(self._text)):
                return self._take(match.end()) if match else ""
            yield

    def space(self) -> Steps[str]:
        """Reads white space. Returns the character after it, which is not read; "" at the end of the text."""
        while True:
            match = _SPACE.match(self._text, self._position)
            self._take(match.end() if match else self._position)
            if self._position < len(self._text) or self.is_complete:
                return self._text[self._position : self._position + 1]
            yield

    def value(self, say: Callable[[str], None], depth: int = 0) -> Steps[bool]:
        """Reads a value of JSON or Python, and streams its text. Returns whether it is complete.

        Only strings and brackets are checked. A "<" or "`" outside of strings ends a broken value: a marker follows.
        White space at the end of a broken value is not read. depth: the number of opening brackets of the value that
        were already read
        """
        quote = ""
        is_scalar = False
        num_spaces = 0  # that are held back
        while True:
            index = self._position + num_spaces
            result: bool | None = None
            while result is None and index < len(self._text):
                pattern = _IN_STRING[quote] if quote else _STRUCTURE if depth else _END_OF_SCALAR
                match = pattern.search(self._text, index)
                start, found = (match.start(), match[0]) if match else (len(self._text), "")
                is_scalar = is_scalar or (not depth and not quote and start > index)
                index = start + len(found)
                if found == "\\" and not self.is_complete:
                    index = start
                    break
                if quote:
                    quote = "" if found == quote else quote
                    result = None if depth or quote else True
                elif found and (is_scalar or found not in "\"'([{)]}" or (not depth and found in ")]}")):
                    index = start
                    result = is_scalar
                elif found:
                    quote = found if found in "\"'" else ""
                    depth += (found in "([{") - (found in ")]}")
                    result = None if depth or quote else True
            text = self._text[self._position : index]
            num_spaces = 0 if quote or result else len(text) - len(text.rstrip())
            if len(text) > num_spaces:
                say(self._take(index - num_spaces))
            if result is not None or self.is_complete:
                return result or (is_scalar and result is None)
            yield

    def whole_value(self) -> Steps[tuple[str, bool]]:
        """Reads a value. Returns its text, and whether it is complete."""
        pieces: list[str] = []
        is_complete = yield from self.value(pieces.append)
        return "".join(pieces), is_complete

    def rewrite(self, markers: tuple[str, ...], change: Callable[[str], str | None]) -> Steps[bool]:
        """Waits for the next of the markers, and replaces the unread text before it. Changes nothing if the answer ends
        without a marker. Returns False if the replacement is None."""
        searched = 0
        while True:
            start, marker = self._find(markers, searched)
            if marker:
                text = change(self._text[self._position : start])
                if text is None:
                    return False
                self._text = text + self._text[start:]
                self._position = 0
            if marker or self.is_complete:
                return True
            searched = start - self._position
            yield

    def unread(self, text: str) -> None:
        """Returns the last characters of a marker that was just read to the unread text."""
        self._position -= len(text)

    def _find(self, markers: tuple[str, ...], searched: int = 0) -> tuple[int, str]:
        """Return (position up to which the text contains no marker, the marker that begins there, or "" if none is
        complete).

        searched: the number of characters that are known to contain none
        """
        complete, part, length = _patterns(markers)
        begin = self._position + searched
        match = complete.search(self._text, begin)
        if not self.is_complete:
            # A longer marker may begin at the same character, or another one before it.
            partial = part.search(self._text, max(begin, len(self._text) - length))
            if partial and not (match and match.start() < partial.start()):
                return partial.start(), ""
        return (match.start(), match[0]) if match else (len(self._text), "")

    def _take(self, end: int) -> str:
        text = self._text[self._position : end]
        self._position = end
        if text and self.is_attempt and self._held is not None:
            self._held.append(text)
        return text


class Parsing:
    """The Parser that runs a generator."""

    def __init__(self, parse: Callable[..., Steps[None]], *arguments: Any) -> None:
        self._reader = Reader()
        self._steps = parse(self._reader, *arguments)
        next(self._steps, None)

    def feed(self, text: str) -> list[Event]:
        self._reader.add(text)
        next(self._steps, None)
        events = self._reader.events
        self._reader.events = []
        return events

    def finish(self) -> list[Event]:
        self._reader.is_complete = True
        return self.feed("")
