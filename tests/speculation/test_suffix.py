"""Drafts from text that was seen before."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from quire.speculation.suffix import SuffixOptions, SuffixProposer


@dataclass
class Words:
    """A text for a proposer."""

    token_ids: list[int]
    num_prompt_tokens: int = 0
    request_id: str = "a"
    cache_salt: str | None = None


def propose(text: list[int], most: int = 4, **options: float) -> list[int]:
    return SuffixProposer(SuffixOptions(**options)).propose([Words(text)], [most])[0]


def test_a_text_goes_on_as_it_did_at_the_longest_match():
    assert propose([1, 2, 3, 4, 5, 9, 3, 8, 8, 1, 2, 3], factor=9) == [4, 5, 9, 3]
    assert propose([7, 3, 5, 5, 1, 2, 3, 4, 4, 2, 3], factor=9) == [4, 4, 2, 3]


def test_nothing_is_proposed_without_a_match_that_is_long_enough():
    assert propose([1, 2, 3, 4]) == []
    assert propose([1, 2, 3, 9, 1], min_match=2) == []
    assert propose([1, 2, 3, 9, 1, 2], min_match=2, factor=9) == [3, 9, 1, 2]
    assert propose([5]) == []


def test_the_drafts_are_at_most_as_many_as_the_match_is_worth():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert propose(text, factor=1.0) == [3, 4]
    assert propose(text, factor=2.0) == [3, 4, 5, 6]
    assert propose(text, most=1, factor=2.0) == [3]


def test_a_repetition_goes_on():
    assert propose([9, 1, 2, 1, 2, 1, 2], most=6, factor=9, max_match=3) == [1, 2, 1, 2, 1, 2]
    assert propose([4, 4, 4], most=3, factor=9) == [4, 4, 4]


def test_the_most_frequent_continuation_is_followed_while_it_is_likely():
    text = [1, 5, 1, 6, 1, 6, 1, 6, 0, 1]
    assert propose(text, most=1, max_match=1) == [6]
    assert propose(text, most=1, max_match=1, min_probability=0.8) == []


def test_recent_answers_are_searched_within_their_salt():
    proposer = SuffixProposer(SuffixOptions(factor=9, recent_tokens=100))
    proposer.propose([Words([1, 2])], [4])
    proposer.finish(Words([1, 2, 11, 12, 13, 14, 15], num_prompt_tokens=2))
    asks = Words([8, 11, 12], request_id="b")
    assert proposer.propose([asks], [4]) == [[13, 14, 15]]
    assert proposer.propose([Words([8, 11, 12], request_id="c", cache_salt="other")], [4]) == [[]]


def test_recent_answers_take_a_bounded_memory():
    proposer = SuffixProposer(SuffixOptions(recent_tokens=50))
    for number in range(300):
        text = Words(list(range(number, number + 20)), request_id=str(number), cache_salt=str(number % 7))
        proposer.propose([text], [1])
        proposer.finish(text)
    assert sum(memory.length for memory in proposer._recent.values()) <= 4 * 50 + 100
    assert not proposer._texts


@pytest.mark.parametrize("seed", range(5))
def test_a_growing_text_is_followed(seed: int):
    """What a proposer knows of a text that grows is what it would know of the whole text."""
    dice = random.Random(seed)
    growing = Words([dice.randrange(5) for _ in range(10)])
    options = SuffixOptions(factor=2.0)
    proposer = SuffixProposer(options)
    for _ in range(60):
        growing.token_ids += [dice.randrange(5) for _ in range(dice.randint(1, 4))]
        assert proposer.propose([growing], [6]) == SuffixProposer(options).propose([Words(growing.token_ids)], [6])
