"""Strings in one piece of memory are those of a list."""

import random

import numpy as np
import pytest

from quire.text.strings import LONGEST, Strings

TEXTS = ["", "a", "hello", "Ġhello", "▁▁", "é" * 40, "12345678", "123456789", "\0", " ", "\N{PILE OF POO}", "x" * 300]


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("ab Ġé\N{PILE OF POO}", k=draw.randrange(1, 40))) for _ in range(count)]


def test_they_are_a_sequence():
    strings = Strings.of(TEXTS)
    assert list(strings) == TEXTS
    assert strings == TEXTS
    assert strings[2] == "hello"
    assert strings[-1] == TEXTS[-1]
    assert strings[1:4] == TEXTS[1:4]
    assert (len(strings), strings.longest, strings.longest_text) == (len(TEXTS), 300, 300)
    assert list(Strings.of([])) == []
    with pytest.raises(IndexError):
        strings[len(TEXTS)]


def test_find_gives_the_index_that_a_dictionary_gives():
    texts = list(dict.fromkeys([*TEXTS, *random_texts(5_000)]))
    strings, known = Strings.of(texts[::2]), {text: i for i, text in enumerate(texts[::2])}
    assert strings.can_be_searched
    asked = [*texts, "x" * (LONGEST + 1), "x" * 301, "1234567", "hell"]
    assert strings.find(Strings.of(asked)).tolist() == [known.get(text, -1) for text in asked]
    assert Strings.of([]).find(Strings.of(asked)).tolist() == [-1] * len(asked)
    assert strings.find(Strings.of([])).tolist() == []


def test_equal_or_long_strings_cannot_be_searched():
    assert not Strings.of(["a", "b", "a"]).can_be_searched
    assert not Strings.of(["a", "x" * (LONGEST + 1)]).can_be_searched
    assert Strings.of([]).can_be_searched


def test_equal_hashes_are_no_equal_strings(monkeypatch):
    monkeypatch.setattr("quire.text.strings._hashes", lambda padded, starts, lengths: np.zeros(len(starts), np.uint64))
    assert Strings.of(["ab"]).find(Strings.of(["ab", "ac", "abc", ""])).tolist() == [0, -1, -1, -1]
    assert not Strings.of(["ab", "ac"]).can_be_searched


def test_bytes_that_are_no_text_are_replaced_in_each_string():
    """An é that is cut in two is no character, though the two halves stand side by side."""
    data = np.frombuffer("aéb".encode() + b"\xff", np.uint8)
    strings = Strings(data, np.array([0, 2, 1, 4]), np.array([2, 2, 2, 1]))
    assert list(strings) == [
        "a\N{REPLACEMENT CHARACTER}",
        "\N{REPLACEMENT CHARACTER}b",
        "é",
        "\N{REPLACEMENT CHARACTER}",
    ]
