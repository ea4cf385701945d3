"""Answers are wrapped at the borders of words while they stream."""

from __future__ import annotations

import re
import unicodedata

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.cli.terminal import Wrapper


def screen(written: str, columns: int) -> list[str]:
    """The lines of a terminal of that width, which must never have to break one by itself."""
    lines, position = [[]], 0
    for part in re.findall(r"\x1b\[(?:\d+)?[DK]|.", written, re.DOTALL):
        line = lines[-1]
        if part == "\n":
            lines.append([])
            position = 0
        elif part.endswith("D") and part.startswith("\x1b"):
            position -= int(part[2:-1])
            assert position >= 0
        elif part == "\x1b[K":
            del line[position:]
        else:
            assert part >= " "
            cells = [part, ""] if unicodedata.east_asian_width(part) in "WF" else [part]
            line[position:] = cells
            position += len(cells)
            assert position < columns
    return ["".join(line) for line in lines]


def wrap(text: str, columns: int) -> list[str]:
    return screen(Wrapper(columns).feed(text), columns)


def test_a_word_that_does_not_fit_moves_to_the_next_line():
    assert wrap("the quick brown fox", 11) == ["the quick ", "brown fox"]
    assert wrap("the quick brown fox", 10) == ["the quick", "brown fox"]
    assert wrap("one\n\ntwo three", 8) == ["one", "", "two ", "three"]


def test_a_word_longer_than_a_line_is_broken_and_nothing_hangs():
    assert wrap("a abcdefghijkl m", 6) == ["a ", "abcde", "fghij", "kl m"]


def test_wide_characters_take_two_columns_and_lines_break_between_them():
    assert wrap("日本語の文", 6) == ["日本", "語の", "文"]


def test_control_characters_of_a_model_do_nothing():
    assert Wrapper(80).feed("a\x1b[2Jb\rc\x07") == "a[2Jbc"


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.text("ab cdé日\n", max_size=12)), st.integers(3, 12))
def test_pieces_make_the_same_screen_as_the_whole_and_no_word_is_lost(pieces, columns):
    wrapper, text = Wrapper(columns), "".join(pieces)
    shown = screen("".join(map(wrapper.feed, pieces)), columns)
    assert shown == wrap(text, columns)
    assert re.sub(r"\s", "", "".join(shown)) == re.sub(r"\s", "", text)
    for word in re.findall("[^ \n日]+", text):
        if len(word) < columns:
            assert any(word in line for line in shown)
