"""The semantic cache: what is found, and what is dropped."""

import time

import numpy as np
import pytest

from quire.semantic.cache import Answer, SemanticCache, cache_key
from quire.semantic.embedder import Vector
from quire.semantic.rules import Cache


def answer(text: str) -> Answer:
    return Answer(((b"content-type", b"text/plain"),), text.encode())


def at(degrees: float) -> Vector:
    return np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], np.float32)


def key(number: int, api_key: bytes = b"") -> bytes:
    return cache_key("/v1/completions", {"seed": number, "prompt": None}, api_key)


def test_the_most_similar_request_is_found():
    cache = SemanticCache(Cache(similarity=0.99))
    cache.add(key(1), at(0), answer("zero"))
    cache.add(key(1), at(10), answer("ten"))
    hit = cache.find(key(1), at(6))
    assert hit is not None
    assert hit.answer == answer("ten")
    assert hit.similarity == pytest.approx(np.cos(np.radians(4)))
    assert cache.find(key(1), at(60)) is None
    assert cache.find(key(2), at(0)) is None
    assert cache.find(key(1, b"another tenant"), at(0)) is None


def test_keys_do_not_depend_on_the_order_of_fields():
    first = cache_key("/v1/completions", {"a": 1, "b": {"c": 2, "d": 3}}, b"")
    assert cache_key("/v1/completions", {"b": {"d": 3, "c": 2}, "a": 1}, b"") == first
    assert cache_key("/v1/messages", {"b": {"d": 3, "c": 2}, "a": 1}, b"") != first


def test_the_least_recently_used_answer_is_dropped_first():
    cache = SemanticCache(Cache(max_entries=2))
    for number in range(2):
        cache.add(key(number), at(0), answer(str(number)))
    assert cache.find(key(0), at(0)) is not None
    cache.add(key(2), at(0), answer("2"))
    assert [cache.find(key(number), at(0)) is not None for number in range(3)] == [True, False, True]


def test_bytes_are_limited():
    cache = SemanticCache(Cache(max_bytes=1600))
    cache.add(key(0), at(0), answer("x" * 101))  # more than a sixteenth
    assert len(cache) == cache.size == 0
    for number in range(20):
        cache.add(key(number), at(0), answer("x" * 100))
    assert (len(cache), cache.size) == (16, 1600)


def test_old_answers_are_dropped(monkeypatch: pytest.MonkeyPatch):
    cache = SemanticCache(Cache(ttl=10))
    cache.add(key(0), at(0), answer("old"))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    assert cache.find(key(0), at(0)) is None
    assert len(cache) == cache.size == 0
