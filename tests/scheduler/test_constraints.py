"""Requests with a constraint: which tokens are taken without being sampled, and which masks a step gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import numpy as np
import pytest

from quire.kv.specs import attention_spec
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.constraints import ConstrainedRequests
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import ConstrainedOutput
from quire.scheduler.scheduler import Scheduler

EOS = 0
ANY = -1  # in a text: a token that is sampled, and may be any
PROMPT = [1, 2, 3]


class Text:
    """A constraint that allows one text, and then the end."""

    error: str | None = None

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.position = [*tokens, EOS], 0

    @property
    def is_active(self) -> bool:
        return self.error is None and self.position < len(self.tokens)

    def fork(self) -> Text:
        return copy(self)

    def advance(self, token: int) -> None:
        if self.is_active and self.tokens[self.position] in (ANY, token):
            self.position += 1
        elif self.is_active:
            self.error = f"not {token}"

    def forced(self) -> list[int]:
        rest = [] if self.error else self.tokens[self.position :]
        return rest[: rest.index(ANY)] if ANY in rest else rest


class Texts:
    """In place of the gate that compiles grammars: the texts of requests, by their names. A mask is a position."""

    def __init__(self, **texts: list[int]) -> None:
        self.texts = texts
        self.num_fills = 0

    def ready(self, request: EngineCoreRequest) -> bool:
        return True

    def connect(self, wake: Callable[[], None]) -> None:
        pass

    def leave(self, request: EngineCoreRequest) -> None:
        pass

    def constraint(self, request: EngineCoreRequest) -> Text | None:
        return Text(self.texts[request.request_id]) if request.request_id in self.texts else None

    def fill(self, constraints: Sequence[Text], bits: np.ndarray) -> None:
        self.num_fills += 1
        bits[:] = [[constraint.position] for constraint in constraints]


def make_scheduler(texts: Texts, **limits: int) -> Scheduler:
    given = SchedulerLimits(8, 64, 64, **limits)
    return Scheduler(given, 64, [attention_spec([0])], 4, grammars=texts, vocab_size=32)  # type: ignore[arg-type]


def make_request(name: str, max_tokens: int = 8, min_tokens: int = 0, logprobs: int | None = None) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, logprobs=logprobs)
    return EngineCoreRequest(name, PROMPT, params, 0, max_tokens, EOS)


def retire(scheduler: Scheduler, step: SchedulerOutput, *tokens: int) -> list[EngineCoreOutput]:
    return scheduler.update(ModelRunnerOutput(step.step_id, [[token] for token in tokens]))


def masks(scheduler: Scheduler) -> tuple[list[int], list[int]]:
    """The places of the last step's masks, and what they hold."""
    found = scheduler.masks.wait()
    assert found is not None
    return found.places, np.frombuffer(found.bits, np.int32).tolist()


@pytest.mark.parametrize(
    ("text", "options", "known"),
    [
        ([5, 6, ANY], {}, [5, 6]),
        ([5, 6], {}, [5, 6]),  # the end is sampled
        ([], {}, []),
        ([5, 6, 7], {"max_tokens": 3}, [5, 6]),  # so is the last token
        ([5, 6, ANY], {"min_tokens": 1}, []),
        ([5, 6, ANY], {"logprobs": 0}, []),
    ],
)
def test_tokens_that_must_come_first_are_computed_with_the_prompt(text, options, known):
    scheduler = make_scheduler(Texts(a=text))
    scheduler.add(make_request("a", **options))
    step = scheduler.schedule()
    assert step.new_requests[0].token_ids == PROMPT + known
    assert step.num_tokens == [len(PROMPT + known)]


def test_tokens_that_are_forced_behind_a_sampled_one_are_told_to_the_worker():
    scheduler = make_scheduler(Texts(a=[ANY, 5, 6, ANY], b=[ANY] * 4))
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    outputs = retire(scheduler, scheduler.schedule(), 9, 8)
    assert [output.new_token_ids for output in outputs] == [[9, 5, 6], [8]]
    step = scheduler.schedule()
    rows = {request.request_id: request.row for request in scheduler.running}
    known = step.known_tokens
    assert (known.rows, known.positions, known.token_ids) == ([rows["a"]] * 2, [4, 5], [5, 6])
    assert dict(zip(step.rows, step.num_tokens, strict=True)) == {rows["a"]: 3, rows["b"]: 1}
    assert masks(scheduler) == ([0, 1], [3, 1])


def test_a_text_that_is_complete_ends_its_request():
    scheduler = make_scheduler(Texts(a=[ANY, 5]))
    scheduler.add(make_request("a"))
    (output,) = retire(scheduler, scheduler.schedule(), 9)
    assert (output.new_token_ids, output.finish_reason) == ([9, 5, EOS], FinishReason.STOP)
    assert not scheduler.has_unfinished


def test_before_min_tokens_the_end_of_a_text_is_not_taken():
    scheduler = make_scheduler(Texts(a=[ANY]))
    scheduler.add(make_request("a", min_tokens=4))
    (output,) = retire(scheduler, scheduler.schedule(), 9)
    assert output.new_token_ids == [9]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "the grammar allows no further token")


def test_only_requests_with_a_constraint_have_masks_until_the_last_one_ends():
    texts = Texts(a=[ANY] * 4)
    scheduler = make_scheduler(texts)
    for name, max_tokens in (("plain", 1), ("another", 8), ("a", 2)):
        scheduler.add(make_request(name, max_tokens))
    step = scheduler.schedule()
    assert scheduler.masks.are_needed()
    assert masks(scheduler) == ([2], [0])
    retire(scheduler, step, 9, 9, 9)  # the first request ends
    step = scheduler.schedule()
    assert scheduler.masks.are_needed()
    scheduler.masks.begin()
    assert masks(scheduler) == ([1], [1])
    assert texts.num_fills == 2
    retire(scheduler, step, 9, 9)  # the request with the constraint ends
    scheduler.schedule()
    assert not scheduler.masks.are_needed()
    assert scheduler.masks.wait() is None


def test_in_a_pipeline_the_masks_that_were_begun_are_those_of_the_last_step():
    texts = Texts(a=[ANY] * 4, b=[ANY] * 4)
    scheduler = make_scheduler(texts, depth=2, stages=2)
    for name in "ab":
        scheduler.add(make_request(name))
        scheduler.schedule()
        scheduler.masks.begin()
        assert masks(scheduler) == ([0], [0])
    assert texts.num_fills == 2


def test_drafts_are_cut_off_before_the_first_one_that_is_not_allowed():
    output = ConstrainedOutput(Text([5, 6, ANY]), 0, True)  # type: ignore[arg-type]
    assert ConstrainedRequests.check_drafts(output, [5, 7, 6]) == [5]
    assert [ahead.position for ahead in output.ahead] == [1]  # type: ignore[attr-defined]
    assert output.constraint.position == 0  # type: ignore[attr-defined]
