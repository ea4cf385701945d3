"""Draws Markdown on a terminal while it is being written."""

import io
import re
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from os import terminal_size
from typing import TYPE_CHECKING, ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, ListElement, Markdown
from rich.text import Text
from rich.theme import Theme

if TYPE_CHECKING:
    from markdown_it.token import Token

_SECONDS = 0.03  # between two drawings, at least
_SHARE = 0.1  # of the time that drawing may take, since the model computes in the same process
_THEME = Theme({"markdown.code": "cyan"})  # on any background
_STYLES = re.compile(r"\x1b\[[\d;]*m")


class MarkdownWriter:
    """Draws a growing Markdown text.

    Only the last block of the text (a paragraph, a list, a table, ...) can still change, for instance when the second
    line of a table arrives. Only that block is therefore parsed and drawn again, from the first changed line. Lines
    that have scrolled off the screen cannot be redrawn. If one of them has changed, the block is printed again.
    """

    def __init__(self, size: Callable[[], terminal_size], seconds: float = _SECONDS) -> None:
        """size: returns the size of the terminal, which may change. seconds: the minimum time between two drawings."""
        self._size = size
        self._seconds = seconds
        self._parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 100}).enable(["strikethrough", "table"])
        self._parser.disable("reference")  # the addresses of links come last, when the links are drawn already
        self._source = ""  # from the last block's beginning
        self._lines: list[str] = []  # its drawn lines; the cursor is at the end of the last one
        self._columns = size().columns
        self._due = 0.0

    def feed(self, text: str) -> str:
        """Return the characters to write to the terminal for the next piece of text.

        Some pieces only become visible with a later one or with `finish`.
        """
        # A model must not move the cursor or change the colours.
        self._source += "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
        began = time.monotonic()
        if began < self._due:
            return ""
        written = self._draw()
        ended = time.monotonic()
        self._due = ended + max(self._seconds, (ended - began) / _SHARE if self._seconds else 0.0)
        return written

    def finish(self) -> str:
        """Return the characters to write at the end of the text."""
        return self._draw()

    def _draw(self) -> str:
        size = self._size()
        was_resized = size.columns != self._columns
        self._columns = size.columns
        blocks = list(_blocks(self._parser.parse(self._source)))
        source = self._source.split("\n")
        parts = [self._render(tokens, source) for _, tokens in blocks]
        lines = _join(parts)
        # A block is complete when the next one has begun. An incomplete line may still belong to either block.
        begun = [i for i, (start, _) in enumerate(blocks) if start < len(source) - 1 and parts[i]]
        written = self._write_again(lines) if was_resized else self._change(lines, size.lines)
        self._lines = lines
        if begun and begun[-1] > 0:
            last = begun[-1]
            self._lines = _join(parts[last:])
            self._source = "\n".join(source[blocks[last][0] :])
        return written

    def _change(self, lines: list[str], rows: int) -> str:
        """Change the drawn lines to `lines`."""
        old = self._lines
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, lines, strict=False)))
        if same == len(old):
            return "".join(f"\n{line}" for line in lines[same:]) if old else "\n".join(lines)
        first = min(same, max(len(lines) - 1, 0))
        top = max(len(old) - rows, 0)  # the first line that is on the screen
        if first < top:
            if len(lines) <= top or list(map(_plain, old[:top])) != list(map(_plain, lines[:top])):
                return self._write_again(lines)
            first = top
        up = len(old) - 1 - first
        return "\r" + (f"\x1b[{up}A" if up else "") + "\x1b[J" + "\n".join(lines[first:])

    def _write_again(self, lines: list[str]) -> str:
        return ("\n" if self._lines else "") + "\n".join(lines)

    def _render(self, tokens: "list[Token]", source: list[str]) -> list[str]:
        """Return the lines of one block, without surrounding blank lines. Text that Markdown would hide is shown as
        written.

        source: the lines of the text.
        """
        # A terminal wraps the line itself when its last column is used.
        console = Console(file=io.StringIO(), force_terminal=True, width=max(self._columns - 1, 1), theme=_THEME)
        document = _Document("", code_theme="ansi_dark", hyperlinks=False)
        document.parsed = list(map(_adapt, tokens))
        for content in (document, Text("\n".join(source[slice(*tokens[0].map or ())]))):
            with console.capture() as captured:
                console.print(content, end="")
            lines = [line.rstrip() for line in captured.get().split("\n")]
            visible = [i for i, line in enumerate(lines) if _plain(line).strip()]
            if visible:
                return lines[visible[0] : visible[-1] + 1]
        return []


class _Heading(Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _List(ListElement):
    """A numbered list whose numbers have the same width up to 99, so that its tenth item does not shift the others."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        number = 1 if self.list_start is None else self.list_start
        for i, item in enumerate(self.items, number):
            yield from item.render_number(console, options, i, max(number + len(self.items), 10))


class _Document(Markdown):
    elements: ClassVar = {**Markdown.elements, "heading_open": _Heading, "ordered_list_open": _List}


def _blocks(tokens: "Iterable[Token]") -> "Iterator[tuple[int, list[Token]]]":
    """The top-level blocks: the source line where each begins, and its tokens."""
    block: list[Token] = []
    for token in tokens:
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            start = block[0].map
            assert start is not None
            yield start[0], block
            block = []


def _adapt(token: "Token") -> "Token":
    """Line breaks are kept, for instance in poems. A link whose text is its address is shown once."""
    for child in token.children or ():
        if child.type == "softbreak":
            child.type = "hardbreak"
    if token.children:
        token.children = [child for child in token.children if child.markup != "autolink"]
    return token


def _join(parts: Iterable[list[str]]) -> list[str]:
    """Return the lines of blocks, separated by blank lines."""
    lines: list[str] = []
    for part in parts:
        lines += ["", *part] if lines and part else part
    return lines


def _plain(line: str) -> str:
    return _STYLES.sub("", line)
