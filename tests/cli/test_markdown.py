"""Markdown is drawn while it arrives: judged by the screen of a terminal emulator."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

import pyte
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.cli.markdown import MarkdownWriter
from support.terminal import script

DOCUMENT = """\
# A title

Some *text* with **bold**, `code`, ~~nothing~~ and a [link](http://a.b/c), which is longer than a line.
A second line

1. one
2. two

   - inner <b>item</b>
9. three

> A quote
> of two lines

```python
def f(x):
    return x + 1
```

| name | number |
|------|-------:|
| a    | 1      |
| 日本 | 22     |

***
The end, at <http://quire.example>
"""
DRAWN = """\
A title

Some text with bold, code, nothing and
a link (http://a.b/c), which is longer
than a line.
A second line

  1 one
  2 two
     • inner <b>item</b>
  3 three

▌ A quote
▌ of two lines

 def f(x):
     return x + 1

 name  number
 ────────────
 a          1
 日本      22

---------------------------------------

The end, at http://quire.example"""


class Screen:
    """A terminal with the lines that have scrolled off it."""

    def __init__(self, columns: int = 40, rows: int = 50) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self._stream = pyte.Stream(self._screen)
        self.writer = MarkdownWriter(lambda: os.terminal_size((self._screen.columns, self._screen.lines)), 0)

    def feed(self, text: str) -> None:
        self.write(self.writer.feed(text))

    def write(self, written: str) -> None:
        self._stream.feed(written.replace("\n", "\r\n"))

    def resize(self, columns: int) -> None:
        self._screen.resize(columns=columns)

    @property
    def text(self) -> str:
        columns = range(self._screen.columns)
        history = ["".join(line[x].data for x in columns) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*history, *self._screen.display]).rstrip()


def draw(pieces: list[str], rows: int = 50) -> str:
    screen = Screen(rows=rows)
    for piece in pieces:
        screen.feed(piece)
    return screen.text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [1, 2, 7, 10_000])
def test_pieces_of_any_length_make_the_same_screen(length):
    pieces = [DOCUMENT[start : start + length] for start in range(0, len(DOCUMENT), length)]
    assert draw(pieces) == DRAWN
    assert draw(pieces, rows=12) == DRAWN, "blocks that are complete may scroll away"


def test_every_piece_is_on_the_screen_at_once():
    screen = Screen()
    screen.feed("One **two")
    assert screen.text == "One **two"
    screen.feed("** three")
    assert screen.text == "One two three"
    screen.feed("\n\n| a |\n")
    assert screen.text == "One two three\n\n| a |"
    screen.feed("|---|\n| bcd |")
    assert screen.text == "One two three\n\n a\n ───\n bcd"


def test_drawing_again_waits_while_it_would_take_much_of_the_time_and_nothing_is_lost():
    writer = MarkdownWriter(lambda: os.terminal_size((40, 20)), seconds=3600)
    assert writer.feed("One ") == "One"
    assert writer.feed("two ") == writer.feed("three") == ""
    screen = Screen()
    screen.write("One")
    screen.write(writer.finish())
    assert screen.text == "One two three"


def test_a_block_that_changes_above_the_screen_is_written_again():
    rows = [f"| {i} |" for i in range(30)]
    screen = Screen(rows=10)
    screen.feed("\n".join(["| number |", "|---|", *rows]))
    short = screen.text
    screen.feed("\n| a long line that changes the width |")
    assert screen.text.startswith(short)
    assert screen.text.count(" 29") == 2
    assert screen.text.endswith("a long line that changes the width")


def test_a_window_that_becomes_narrower_loses_nothing():
    screen = Screen(columns=60)
    screen.feed("The quick brown fox jumps over the lazy dog, ")
    screen.resize(20)
    screen.feed("and then\n\nit sleeps.")
    assert screen.text.endswith("\nThe quick brown fox\njumps over the lazy\ndog, and then\n\nit sleeps.")


def test_control_characters_of_a_model_do_nothing():
    assert draw(["a\x1b[2Jb\rc\x07"]) == "a[2Jbc"
    references = "".join(f"&#{code};" for code in range(160) if chr(code) not in "\t\n")
    written = re.sub(r"\x1b\[[\d;]*m", "", MarkdownWriter(lambda: os.terminal_size((999, 20)), 0).feed(references))
    assert [character for character in written if unicodedata.category(character) == "Cc"] == []


@pytest.mark.parametrize("text", ["> " * 100 + "x", "- " * 100 + "x", "1. " * 60 + "x"])
@pytest.mark.parametrize("columns", [1, 3, 40])
def test_what_cannot_be_drawn_is_shown_as_it_is(text, columns):
    screen = Screen(columns=columns)
    screen.feed(text)
    assert "x" in screen.text


_PARTS = [
    "a",
    "bc",
    " ",
    "   ",
    "\n",
    "\n\n",
    "- ",
    "1. ",
    "# ",
    "> ",
    "`",
    "*",
    "**",
    "|",
    "|-",
    "---",
    "=",
    "~~",
    "<b>",
    "\\",
    "&amp;",
    "\t",
    "日",
    "é",
    "😀",
    "[x]:",
    "http://x.y ",
]


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.sampled_from(_PARTS), max_size=40), st.integers(2, 30))
def test_the_end_is_the_same_in_one_piece_and_no_word_is_lost(pieces, rows):
    assume(re.search(r"\|.*\n.*\|-", "".join(pieces)) is None)  # cells beyond the head of a table are left out
    assume(re.search(r"(```|~~~).*(bc|日)", "".join(pieces)) is None)  # the language of a block of code is not shown
    shown = draw(pieces, rows)
    for word in ("bc", "日"):
        assert shown.count(word) >= "".join(pieces).count(word)
    assert draw(["".join(pieces)], rows=500) == draw(pieces, rows=500)


# ---- in a real pseudo-terminal

ANSWER = """\
from quire.cli.terminal import Terminal
terminal = Terminal()
with terminal.conversation(), terminal.answer() as answer:
    answer.show("Let me see.", is_thinking=True)
    for piece in ("**bo", "ld**\\n\\n- on", "e\\n"):
        answer.show(piece)
print("over")
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variables", "drawn"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=str
)
def test_a_terminal_shows_markdown_unless_it_has_no_colours(tmp_path: Path, variables, drawn):
    with script(ANSWER, state=tmp_path, **variables) as session:
        session.wait_for("over")
        assert session.end() == 0
        screen = pyte.Screen(70, 20)
        pyte.Stream(screen).feed(session.screen.replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display]
    if drawn:
        assert lines[:6] == ["Let me see.", "", "bold", "", " • one", ""]
        assert screen.buffer[2][0].bold
    else:
        assert lines[:4] == ["Let me see.**bold**", "", "- one", ""]
