"""The gate at which requests wait for their grammars."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from quire import SamplingParams
from quire.messages.engine import EngineCoreRequest
from quire.platform.untrusted.limits import BusyError, LimitExceededError, WorkerError
from quire.structured import gate as gate_module
from quire.structured.constraint import Constraint
from quire.structured.gate import GrammarGate, Loaded
from quire.structured.grammar import Backend
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


class SlowBackend(Backend):
    """Compiles words. A word waits until its event is set. As its own compiler, it uses threads.

    failures: words for which the compiler raises an exception. loading: words that raise one when they are loaded.
    """

    def __init__(self) -> None:
        self.may_finish: dict[str, threading.Event] = {}
        self.compiled: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.jobs: dict[str, Future] = {}
        self.threads = ThreadPoolExecutor(8)

    def submit(self, params, done):
        if isinstance(failure := self.failures.get(params.regex), BusyError):
            raise failure
        job = self.jobs[params.regex] = self.threads.submit(lambda: [self.source(params), 1000])
        job.add_done_callback(done)
        return job

    def source(self, params):
        if event := self.may_finish.get(params.regex):
            event.wait(LONGEST)
        self.compiled.append(params.regex)
        if failure := self.failures.get(params.regex):
            raise failure
        return params.regex.encode()

    def load(self, source):
        if source == b"panic":
            raise BaseException("the library is broken")
        return Word(source.decode())

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
    gate = GrammarGate(lambda: loads.append(1) or Loaded(backend, backend, [2]))
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


@pytest.mark.parametrize(
    ("word", "failure", "reason"),
    [
        ("wrong", ValueError("no such word"), "no such word"),
        ("panic", None, "the library is broken"),
        ("slow", LimitExceededError("cpu", "it needs too long"), "the grammar is too complex: it needs too long"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_fails_its_requests_alone_and_is_not_tried_again(
    subject, word, failure, reason
):
    if failure is not None:
        subject.backend.failures[word] = failure
    for name in ("first", "second"):
        with pytest.raises(ValueError, match=f"structured_outputs: .*{reason}"):
            wait(subject, request(word, name))
    wait(subject, request("right"))
    assert subject.backend.compiled.count(word) == 1


@pytest.mark.parametrize("failure", [BusyError("others take the time"), WorkerError("it has ended")])
def test_a_grammar_for_which_there_is_no_time_fails_the_requests_that_wait_and_is_tried_for_later_ones(
    subject, failure
):
    subject.backend.failures["word"] = failure
    for _ in range(2):
        with pytest.raises(BusyError, match=f"structured_outputs: the grammar was not compiled: {failure}"):
            wait(subject, request("word", "early"))
    subject.backend.failures.clear()
    wait(subject, request("word", "late"))
    assert subject.constraint(request("word", "late")).matcher.word == "word"


def test_a_grammar_is_not_compiled_for_a_request_that_has_left(subject):
    for index in range(9):
        subject.backend.may_finish[f"busy{index}"] = threading.Event()
        assert not subject.ready(request(f"busy{index}"))
    assert not subject.ready(request("left", "a"))
    assert not subject.ready(request("left", "b"))
    eventually(lambda: subject.backend.jobs.get("left"))
    subject.leave(request("left", "a"))
    assert not subject.backend.jobs["left"].cancelled()
    subject.leave(request("left", "b"))
    assert subject.backend.jobs["left"].cancelled()
    subject.leave(request("left", "b"))
    subject.leave(request(None))
    for event in subject.backend.may_finish.values():
        event.set()
    wait(subject, request("left", "c"))
    assert subject.backend.compiled.count("left") == 1


def test_the_cache_is_bounded_and_a_request_that_passed_still_gets_its_constraint(subject, monkeypatch):
    monkeypatch.setattr(gate_module, "CACHE_SIZE", 3)
    wait(subject, request("waits"))
    for word in "abcde":
        wait(subject, request(word))
        subject.constraint(request(word))
    assert len(subject._cache) <= 4  # with the one that a request waits for
    assert subject.constraint(request("waits")).matcher.word == "waits"
    wait(subject, request("a"))
    assert subject.backend.compiled.count("a") == 2


def test_the_memory_of_grammars_is_bounded(subject, monkeypatch):
    monkeypatch.setattr(gate_module, "CACHE_BYTES", 3_000)
    for word in "abcde":
        wait(subject, request(word))
        subject.leave(request(word))
    assert len(subject._cache) <= 4
    for word in "fghij":
        wait(subject, request(word))
    assert sum(entry.grammar is not None for entry in subject._cache.values()) <= 4
    for word in "fghij":  # those that requests wait for are loaded again
        assert subject.constraint(request(word)).matcher.word == word
    assert [subject.backend.compiled.count(word) for word in "fghij"] == [1] * 5


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


class SluggishWord(Word):
    """Needs a tenth of a second of processor time for each letter."""

    def fork(self):
        return SluggishWord(self.word)

    def accept(self, token_id):
        use_processor(0.1)
        return super().accept(token_id)


def use_processor(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_request_whose_tokens_take_too_long_fails_alone(subject):
    constraint = Constraint(SluggishWord("a" * 20))
    for _ in range(20):
        constraint.advance(ord("a"))
    assert len(constraint.matcher.word) > 10
    assert constraint.error == "the grammar is too complex: its tokens need 5 ms of processor time each"
    assert not constraint.is_active


def test_a_request_whose_masks_take_too_long_fails_alone(subject, monkeypatch):
    fill = subject.backend.fill

    def fill_slowly(matchers, bits):
        use_processor(0.1 * sum(matcher.word[0] == "s" for matcher in matchers))
        fill(matchers, bits)

    monkeypatch.setattr(subject.backend, "fill", fill_slowly)
    for word in ("slow", "quick"):
        wait(subject, request(word))
    slow, quick = subject.constraint(request("slow")), subject.constraint(request("quick"))
    bits = np.empty((2, 4), np.int32)
    for _ in range(9):
        subject.fill([slow, quick], bits)
    assert slow.error is not None
    assert quick.error is None
