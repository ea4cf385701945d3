"""The gate at which requests wait for their grammars."""

import threading

import numpy as np
import pytest

from quire import SamplingParams
from quire.messages.engine import EngineCoreRequest
from quire_structured import gate as gate_module
from quire_structured.gate import GrammarGate
from support.waiting import LONGEST, eventually


class Word:
    """Accepts the letters of one word, as code points. The word is forced except for its first letter."""

    error = None

    def __init__(self, word: str) -> None:
        self.word = word

    def fork(self) -> "Word":
        if self.word == "fragile":
            raise BaseException("the library is broken")
        return Word(self.word)

    def accept(self, token_id: int) -> bool:
        accepted = self.word[:1] == chr(token_id)
        self.word = self.word[1:]
        return accepted

    def forced(self) -> list[int]:
        return []

    @property
    def is_finished(self) -> bool:
        return not self.word


class SlowBackend:
    """Compiles words. A word waits until its event is set."""

    def __init__(self) -> None:
        self.may_finish: dict[str, threading.Event] = {}
        self.compiled: list[str] = []

    def compile(self, params):
        if event := self.may_finish.get(params.regex):
            event.wait(LONGEST)
        self.compiled.append(params.regex)
        if params.regex == "wrong":
            raise ValueError("no such word")
        if params.regex == "panic":
            raise BaseException("the library is broken")
        return Word(params.regex)

    def fill(self, matchers, bits):
        for row, matcher in enumerate(matchers):
            bits[row] = 0
            bits[row, ord(matcher.word[0]) // 32] = 1 << ord(matcher.word[0]) % 32


def request(word: str | None, name: str = "r") -> EngineCoreRequest:
    params = SamplingParams(structured_outputs=None if word is None else {"regex": word})
    return EngineCoreRequest(name, [1], params, 0, 8)


@pytest.fixture
def subject():
    backend, woken, loads = SlowBackend(), threading.Semaphore(0), []
    gate = GrammarGate(lambda: loads.append(1) or (backend, [2]))
    gate.connect(woken.release)
    gate.backend, gate.woken, gate.loads = backend, woken, loads
    yield gate
    for event in backend.may_finish.values():
        event.set()


def wait(gate: GrammarGate, source: EngineCoreRequest) -> None:
    while not gate.ready(source):
        assert gate.woken.acquire(timeout=LONGEST)


def test_requests_without_grammar_pass_and_load_nothing(subject):
    assert subject.ready(request(None))
    assert subject.constraint(request(None)) is None
    assert not subject.loads


def test_a_request_passes_when_its_grammar_is_compiled_and_delays_no_other(subject):
    subject.backend.may_finish["slow"] = threading.Event()
    assert not subject.ready(request("slow"))
    wait(subject, request("quick"))
    assert not subject.ready(request("slow"))
    subject.backend.may_finish["slow"].set()
    wait(subject, request("slow"))
    assert subject.constraint(request("slow")).matcher.word == "slow"
    assert len(subject.loads) == 1


def test_equal_constraints_are_compiled_once_and_matched_apart(subject):
    wait(subject, request("word", "a"))
    assert subject.ready(request("word", "b"))
    first, second = subject.constraint(request("word", "a")), subject.constraint(request("word", "b"))
    first.advance(ord("w"))
    assert (first.matcher.word, second.matcher.word) == ("ord", "word")
    assert subject.backend.compiled == ["word"]


@pytest.mark.parametrize(("word", "reason"), [("wrong", "no such word"), ("panic", "the library is broken")])
def test_a_grammar_that_cannot_be_compiled_fails_its_requests_alone(subject, word, reason):
    with pytest.raises(ValueError, match=f"structured_outputs: .*{reason}"):
        wait(subject, request(word))
    wait(subject, request("right"))


def test_a_grammar_that_takes_too_long_fails_and_is_not_tried_again(subject, monkeypatch):
    monkeypatch.setattr(gate_module, "TIME_LIMIT", 0.05)
    words = [f"endless{i}" for i in range(gate_module.NUM_THREADS + 2)]
    for word in words:
        subject.backend.may_finish[word] = threading.Event()
    for word in [*words, words[0]]:
        with pytest.raises(ValueError, match=r"too complex: it was not compiled within 0.05 s"):
            wait(subject, request(word))
    monkeypatch.setattr(gate_module, "TIME_LIMIT", LONGEST)
    wait(subject, request("quick"))  # though as many threads as usual are still busy
    for word in words:
        subject.backend.may_finish[word].set()
    eventually(lambda: subject._num_threads <= gate_module.NUM_THREADS)
    assert subject._num_threads == gate_module.NUM_THREADS
    wait(subject, request("another"))


def test_the_cache_is_bounded_and_a_request_that_passed_still_gets_its_constraint(subject, monkeypatch):
    monkeypatch.setattr(gate_module, "CACHE_SIZE", 3)
    for word in "abcde":
        wait(subject, request(word))
    assert len(subject._cache) == 3
    subject.constraint(request("a"))
    assert subject.constraint(request("a")).matcher.word == "a"


def test_masks_are_filled_by_the_back_end_or_have_the_forced_token_alone(subject):
    wait(subject, request("word"))
    open_, finished = subject.constraint(request("word")), subject.constraint(request("word"))
    for letter in "word":
        finished.advance(ord(letter))
    for constraints in ([open_], [finished, open_], [finished]):
        bits = np.full((len(constraints), 4), -1, np.int32)
        subject.fill(constraints, bits)
        allowed = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in bits]
        assert allowed == [[ord("w")] if constraint is open_ else [2] for constraint in constraints]


def test_a_constraint_that_cannot_be_made_has_failed(subject):
    assert not subject.ready(request("fragile"))
    assert subject.woken.acquire(timeout=LONGEST)
    assert subject.ready(request("fragile"))
    constraint = subject.constraint(request("fragile"))
    assert constraint.error == "the constraint could not be made: BaseException: the library is broken"
    assert not constraint.is_active
