"""A semantic cache: answers to previous requests whose last text meant nearly the same.

Everything but that text must be equal: the path, all other fields, earlier turns, and the API key, so that no tenant
gets an answer to another one's request.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.semantic.embedder import Vector
from quire.semantic.rules import Cache

_ENCODER = msgspec.json.Encoder(order="deterministic")


class Answer(NamedTuple):
    """A complete response with status 200. headers: in lower case."""

    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Hit(NamedTuple):
    answer: Answer
    similarity: float


@dataclass
class _Entry:
    key: bytes
    vector: Vector
    answer: Answer
    expires: float


@dataclass
class _Group:
    """The entries of requests that differ only in their last text."""

    entries: list[_Entry] = field(default_factory=list)


class SemanticCache:
    """Bounded by entries, bytes and age. The least recently used entry is dropped first."""

    def __init__(self, options: Cache) -> None:
        self._options = options
        self._groups: dict[bytes, _Group] = {}
        self._used: OrderedDict[int, _Entry] = OrderedDict()  # by id, the least recently used first
        self.size = 0  # bytes of the answers

    def __len__(self) -> int:
        return len(self._used)

    def find(self, key: bytes, vector: Vector) -> Hit | None:
        """Return the answer to the most similar request of the same group."""
        self._drop_old()
        group = self._groups.get(key)
        if group is None:
            return None
        similarities = np.stack([entry.vector for entry in group.entries]) @ vector
        best = int(similarities.argmax())
        if (similarity := float(similarities[best])) < self._options.similarity:
            return None
        entry = group.entries[best]
        self._used.move_to_end(id(entry))
        return Hit(entry.answer, similarity)

    def add(self, key: bytes, vector: Vector, answer: Answer) -> None:
        if len(answer.body) > self.largest:
            return
        entry = _Entry(key, vector, answer, time.monotonic() + self._options.ttl)
        self._groups.setdefault(key, _Group()).entries.append(entry)
        self._used[id(entry)] = entry
        self.size += len(answer.body)
        while len(self._used) > self._options.max_entries or self.size > self._options.max_bytes:
            self._drop(next(iter(self._used.values())))

    @property
    def largest(self) -> int:
        """Bytes of the largest answer that is stored."""
        return self._options.max_bytes // 16

    def _drop_old(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._used.values() if entry.expires <= now]:
            self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        del self._used[id(entry)]
        self.size -= len(entry.answer.body)
        group = self._groups[entry.key]
        group.entries = [other for other in group.entries if other is not entry]
        if not group.entries:
            del self._groups[entry.key]


def cache_key(path: str, rest: dict[str, Any], api_key: bytes) -> bytes:
    """rest: the body without its last text."""
    return sha256(_ENCODER.encode([path, rest, api_key.hex()])).digest()
