"""The table of `quire doctor`: a line for each finding, followed by the advice."""

import os
import textwrap
from collections.abc import Iterable
from typing import TextIO

from quire.cli.checks.finding import Finding, Level
from quire.observability.logging import printable

_COLOURS = {Level.OK: "32", Level.NOTE: "33", Level.PROBLEM: "1;31"}  # green, yellow, bold red
_LEVEL_COLUMNS = max(map(len, Level))
_LEAST_COLUMNS = 30  # for the text; on a narrower terminal, it begins on a line of its own
_LONGEST = 2000  # characters of a text


class Table:
    """columns: the terminal's width, None for unwrapped lines. coloured: whether levels are coloured."""

    def __init__(self, names: Iterable[str], columns: int | None, coloured: bool) -> None:
        self._names = max(map(len, names))
        self._columns = columns
        self._coloured = coloured

    @classmethod
    def of(cls, stream: TextIO, names: Iterable[str]) -> "Table":
        """Return a table suited to the stream. Pipes and files get unwrapped lines without colours, for grep."""
        if not stream.isatty():
            return cls(names, None, False)
        coloured = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        return cls(names, os.get_terminal_size(stream.fileno()).columns or 80, coloured)

    def lines(self, name: str, finding: Finding) -> list[str]:
        """Return the lines of a finding."""
        level = f"{finding.level:<{_LEVEL_COLUMNS}}"
        if self._coloured:
            level = f"\x1b[{_COLOURS[finding.level]}m{level}\x1b[0m"
        indent = _LEVEL_COLUMNS + self._names + 4
        is_narrow = self._columns is not None and self._columns - indent < _LEAST_COLUMNS
        if is_narrow:
            indent = 2
        text = self.wrapped(finding.found, indent)
        if finding.advice:
            first, *rest = self.wrapped(finding.advice, indent + 3)
            text += [f"-> {first}", *(f"   {line}" for line in rest)]
        if is_narrow:
            return [f"{level}  {name}", *(" " * indent + line for line in text)]
        return [f"{level}  {name:<{self._names}}  {text[0]}", *(" " * indent + line for line in text[1:])]

    def wrapped(self, text: str, indent: int = 0) -> list[str]:
        """Return the text in lines that leave room for the indent. Control characters are escaped, since a text may
        come from an untrusted source.
        """
        text = printable(" ".join(text.split()), _LONGEST)
        if self._columns is None:
            return [text]
        # A terminal wraps the line itself when its last column is used. Paths are not broken, so that they can be
        # copied.
        width = max(self._columns - indent - 1, 10)
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
