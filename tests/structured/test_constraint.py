"""The constraint of a request, with a matcher over a fixed text in which some stretches are forced."""

import random

import pytest

from quire.messages.structured_outputs import ThinkingLimits
from quire.structured.constraint import Constraint

EOS, END, START = 99, [50, 51], [40]


class TextMatcher:
    """Accepts one text, a list of sets of tokens. Places with one token are forced, in stretches of at least two."""

    def __init__(self, text: list[set[int]]) -> None:
        self.text, self.position, self.error = text, 0, None

    def accept(self, token_id: int) -> bool:
        if self.position == len(self.text) or token_id not in self.text[self.position]:
            return False
        self.position += 1
        return True

    def forced(self) -> list[int]:
        end = self.position
        while end < len(self.text) and len(self.text[end]) == 1:
            end += 1
        return [min(tokens) for tokens in self.text[self.position : end]]

    @property
    def is_finished(self) -> bool:
        return self.position == len(self.text)


TEXT = [{1}, {2}, {3, 4, 5}, {6}, {7}, {8}, {1, 9}]


def constraint(thinking: ThinkingLimits | None = None, text: list[set[int]] | None = TEXT) -> Constraint:
    return Constraint(None if text is None else TextMatcher(text), thinking, [EOS])


def advance(subject: Constraint, *tokens: int) -> Constraint:
    for token in tokens:
        subject.advance(token)
    return subject


def test_forced_tokens_are_the_same_taken_ahead_or_one_by_one():
    subject = constraint()
    assert subject.forced() == [1, 2]
    advance(subject, 1)
    assert subject.forced() == [2]
    advance(subject, 2)
    assert subject.forced() == []
    assert subject.is_active
    assert advance(subject, 4).forced() == [6, 7, 8]


def test_a_complete_text_forces_the_end_and_is_free_behind_it():
    subject = advance(constraint(), 1, 2, 3, 6, 7, 8, 9)
    assert subject.forced() == [EOS]
    advance(subject, EOS)
    assert not subject.is_active
    assert not subject.forced()
    advance(subject, 17)
    assert subject.error is None


def test_a_token_that_the_grammar_does_not_allow_is_an_error():
    subject = advance(constraint(), 1, 17)
    assert subject.error == "the grammar does not allow token 17"
    assert not subject.is_active


def test_the_grammar_waits_for_the_end_of_the_thinking():
    subject = constraint(ThinkingLimits(END, START, is_open=True))
    assert not subject.is_active
    advance(subject, 40, 17, 50, 17, 50)
    assert not subject.is_active
    advance(subject, 51)
    assert subject.is_active
    assert subject.forced() == [1, 2]
    assert advance(subject, 1, 2, 40).error  # the start marker does not begin another thinking inside the grammar


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_used_up_budget_forces_the_end_marker(budget):
    subject = constraint(ThinkingLimits(END, START, is_open=True, budget=budget))
    for _ in range(budget):
        assert not subject.forced()
        advance(subject, 17)
    assert subject.forced() == END
    assert subject.is_active
    assert advance(subject, 50).forced() == [51]
    assert advance(subject, 51).forced() == [1, 2]


def test_an_end_marker_that_has_begun_is_completed():
    subject = advance(constraint(ThinkingLimits(END, is_open=True, budget=3)), 17, 17, 50)
    assert subject.forced() == [51]


def test_a_budget_without_a_grammar_counts_from_each_start_marker():
    subject = advance(constraint(ThinkingLimits(END, START, budget=2), text=None), 17, 17, 17, 40, 17)
    assert not subject.is_active
    assert advance(subject, 17).forced() == END
    advance(subject, *END, 17, 17, 17)
    assert not subject.is_active
    assert advance(subject, 40, 17, 17).forced() == END


def test_a_tool_call_ends_the_thinking_and_its_budget():
    limits = ThinkingLimits(END, START, is_open=True, budget=4, call_ids=[[60], [61, 62]])
    for call in limits.call_ids:
        subject = advance(constraint(limits, text=None), 17, *call, 17, 17, 17, 17)
        assert not subject.is_active
    assert advance(constraint(limits, text=None), 17, 61, 17, 62).forced() == END


def test_replayed_tokens_lead_to_the_same_state_at_every_place():
    chance = random.Random(1)
    for _ in range(200):
        thinking = ThinkingLimits(END, START, is_open=chance.random() < 0.5, budget=chance.choice([None, 0, 2, 5]))
        subject, output = constraint(thinking), []
        while len(output) < 40 and (not output or output[-1] != EOS):
            replayed = advance(constraint(thinking), *output)
            state = [(c.is_active, list(c.forced()), c.error) for c in (subject, replayed)]
            assert state[0] == state[1]
            if forced := subject.forced():
                token = forced[0]
            elif subject.is_active:
                token = chance.choice(sorted(subject.matcher.text[subject.matcher.position]))
            else:
                token = chance.choice([17, 40, 50, 51])
            advance(subject, token)
            output.append(token)
        assert subject.error is None


def test_an_answer_may_begin_with_thinking_whatever_the_grammar_says():
    limits = ThinkingLimits(END, START)
    subject = constraint(limits)
    assert subject.is_active
    assert (subject.forced(), subject.opening_token) == ([], START[0])
    advance(subject, *START)
    assert not subject.is_active
    assert advance(subject, 7, *END).forced() == [1, 2]
    assert subject.opening_token is None
    assert advance(constraint(limits), 1).forced() == [2]
    assert constraint(ThinkingLimits(END)).opening_token is None
    assert constraint(ThinkingLimits(END, START, is_open=True)).opening_token is None


def test_the_tokens_that_close_thinking_may_be_more_than_its_end():
    limits = ThinkingLimits(END, START, is_open=True, budget=2, closing_ids=[60, *END])
    subject = advance(constraint(limits), 7, 8)
    assert subject.forced() == [60, *END]
    assert advance(subject, 60, *END).forced() == [1, 2]
    assert advance(constraint(limits), *END).forced() == [1, 2]
