"""Parsers of untrusted bytes: they return or raise a declared error, within bounded memory and time.

tools/fuzz_parsers.py searches for inputs that break this, and keeps those in the corpus.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from support.fuzz_replay import replay
from support.fuzz_targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
NAMES = list(TARGETS)
MUTANTS = 300  # of valid inputs; the same in each run


def saved(name: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_once_broke_a_parser_are_refused(name: str) -> None:
    replay(TARGETS[name], saved(name))


@pytest.mark.parametrize("name", NAMES)
def test_valid_inputs_and_changed_ones_are_read_or_refused(name: str) -> None:
    target, draw = TARGETS[name], random.Random(name)
    inputs = list(target.seeds())
    for _ in range(MUTANTS):
        inputs.append(target.mutate(draw.choice(inputs), draw)[: target.max_bytes])
    replay(target, inputs)


@pytest.mark.parametrize("name", ["gguf", "safetensors", "tokenizer", "adapter"])
def test_the_seeds_of_files_are_valid(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].parse(seed)


def test_the_corpus_is_small() -> None:
    files = [file for file in CORPUS.rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} == TARGETS.keys()
    assert sum(file.stat().st_size for file in files) < 200_000


# ---- what counts as a bug


def _bad(data: bytes) -> None:
    if data == b"other error":
        raise KeyError("a")
    if data == b"memory":
        bytearray(1 << 31)
    if data == b"end":
        os.abort()
    if data == b"declared":
        raise ValueError("declared")


@pytest.mark.parametrize(
    ("data", "found"), [(b"other error", "KeyError: 'a'"), (b"memory", "MemoryError"), (b"end", "signal SIGABRT")]
)
def test_a_replay_names_the_input_of_a_bug(data: bytes, found: str) -> None:
    target = Target(_bad, (ValueError,), list, ())
    replay(target, [b"", b"declared"])
    with pytest.raises(AssertionError, match=rf"input 1, b'{data.decode()}'[^$]*{found}"):
        replay(target, [b"", data, b"declared"])
