"""Grammars over token ids, for tests of the engine: random automata with long stretches that are forced."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cache
from threading import Event
from typing import Any

import numpy as np

from quire.messages.structured_outputs import StructuredOutputsParams
from quire.structured.gate import GrammarGate, Loaded
from quire.structured.grammar import Backend

EOS = 2
Automaton = list[dict[int, int]]  # by state: the tokens that may follow, and the states that they lead to


@cache
def automaton(seed: int) -> Automaton:
    """From state 0 to the last one, which nothing follows. Some choices lead back to an earlier state."""
    draw, states = random.Random(seed), list[dict[int, int]]()
    for _ in range(draw.randint(1, 6)):
        for _ in range(draw.choice([0, 0, 1, 2, 3, 9])):  # a forced stretch
            states.append({draw.randint(4, 299): len(states) + 1})
        target = len(states) + 1
        choices = dict.fromkeys(draw.sample(range(4, 300), draw.choice([2, 5, 40])), target)
        for token in list(choices)[: draw.choice([0, 1, 4, 9])]:
            choices[token] = draw.randrange(target)
        states.append(choices)
    return [*states, {}]


class AutomatonMatcher:
    error: str | None = None

    def __init__(self, states: Automaton) -> None:
        self.states, self.state = states, 0

    def accept(self, token_id: int) -> bool:
        allowed = self.states[self.state]
        if token_id not in allowed:
            return False
        self.state = allowed[token_id]
        return True

    def forced(self) -> list[int]:
        stretch, state = [], self.state
        while len(self.states[state]) == 1:
            [(token, state)] = self.states[state].items()
            stretch.append(token)
        return stretch

    def fork(self) -> AutomatonMatcher:
        return copy(self)

    @property
    def is_finished(self) -> bool:
        return not self.states[self.state]


class BrokenMatcher(AutomatonMatcher):
    """Gives up at its third token."""

    num_tokens = 0

    def accept(self, token_id: int) -> bool:
        self.num_tokens += 1
        self.error = "it has grown too large" if self.num_tokens == 3 else None
        return self.error is None and super().accept(token_id)


class RaisingMatcher(AutomatonMatcher):
    """Raises an exception at its third token."""

    num_tokens = 0

    def accept(self, token_id: int) -> bool:
        self.num_tokens += 1
        if self.num_tokens == 3:
            raise RuntimeError("the library raises")
        return super().accept(token_id)


class PanickingMatcher(AutomatonMatcher):
    """Its library panics when it fills the mask of the third token."""

    num_tokens = 0

    def accept(self, token_id: int) -> bool:
        self.num_tokens += 1
        return super().accept(token_id)


BROKEN = [BrokenMatcher, RaisingMatcher, PanickingMatcher]


class AutomatonBackend(Backend):
    """The text of a grammar is the seed of an automaton: negative for one that breaks; see BROKEN."""

    def __init__(self) -> None:
        self.num_filled = 0  # masks
        self.may_compile = Event()
        self.may_compile.set()

    def source(self, params: StructuredOutputsParams) -> bytes:
        self.may_compile.wait()
        if params.grammar == "bad":
            raise ValueError("the grammar has no end")
        return str(params.grammar or 0).encode()

    def load(self, source: bytes) -> AutomatonMatcher:
        seed = int(source)
        kind = AutomatonMatcher if seed >= 0 else BROKEN[(-1 - seed) // 100]
        return kind(automaton(seed))

    def fill(self, matchers: Sequence[Any], bits: np.ndarray) -> None:
        self.num_filled += len(matchers)
        bits[:] = 0
        for line, matcher in zip(bits.view(np.uint32), matchers, strict=True):
            if isinstance(matcher, PanickingMatcher) and matcher.num_tokens == 2:
                raise BaseException("the library panics")
            for token in matcher.states[matcher.state] or [EOS]:
                line[token // 32] |= np.uint32(1 << token % 32)


def automaton_gate() -> tuple[AutomatonBackend, GrammarGate]:
    backend = AutomatonBackend()
    return backend, gate_of(backend, EOS)


class ThreadCompiler:
    """Compiles grammars on threads of this process, instead of worker processes."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._threads = backend, ThreadPoolExecutor(8)

    def submit(self, params: StructuredOutputsParams, done: Callable[[Future[Any]], None]) -> Future[Any]:
        job = self._threads.submit(lambda: [self._backend.source(params), 0])
        job.add_done_callback(done)
        return job


def gate_of(backend: Backend, *eos_token_ids: int) -> GrammarGate:
    return GrammarGate(lambda: Loaded(backend, ThreadCompiler(backend), list(eos_token_ids)))


def follows(seed: int, token_ids: Sequence[int]) -> bool:
    """Whether the tokens are a beginning of a text of an automaton, perhaps with end-of-sequence behind the whole."""
    matcher = AutomatonMatcher(automaton(seed))
    text = token_ids[:-1] if token_ids and token_ids[-1] == EOS else token_ids
    return all(map(matcher.accept, text)) and (text is token_ids or matcher.is_finished)


def grammar(seed: int | str) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar=str(seed))
