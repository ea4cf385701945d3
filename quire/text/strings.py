"""Many strings in one piece of memory, such as a vocabulary. Python objects are only created on access."""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

LONGEST = 1024  # bytes of a string that can be looked up
_PIECE = 1 << 16  # bytes that are decoded at once
_WORD = 8  # bytes that are hashed and compared at once
_MIX, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)


class Strings(Sequence[str]):
    """An immutable sequence of strings.

    data: their UTF-8, in any order. starts, lengths: the place of each string in it. Invalid UTF-8 becomes U+FFFD.
    """

    def __init__(self, data: Bytes, starts: Places, lengths: Places) -> None:
        if not _is_utf8(data, starts, lengths):
            content = data.tobytes()
            places = zip(starts.tolist(), lengths.tolist(), strict=True)
            data, starts, lengths = _joined(content[s : s + n].decode("utf-8", "replace") for s, n in places)
        self._content = data.tobytes() + bytes(_WORD)  # a word may be read beyond the end
        self._padded = np.frombuffer(self._content, np.uint8)
        self.starts = starts
        self.lengths = lengths

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Build from Python strings. Raises ValueError for a text with half of a surrogate pair."""
        return cls(*_joined(texts))

    @property
    def data(self) -> Bytes:
        return self._padded[:-_WORD]

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self.pick(np.arange(len(self))[index])
        start = int(self.starts[index])
        return self._content[start : start + int(self.lengths[index])].decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self.pick(None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def pick(self, ids: npt.NDArray[Any] | None) -> list[str]:
        """Return the strings with these indices, None for all."""
        starts, lengths = (self.starts, self.lengths) if ids is None else (self.starts[ids], self.lengths[ids])
        content = self._content
        stops = (starts + lengths).tolist()
        return [content[start:stop].decode() for start, stop in zip(starts.tolist(), stops, strict=True)]

    @property
    def longest(self) -> int:
        """The number of bytes in the longest string."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def longest_text(self) -> int:
        """The number of characters in the longest string."""
        if not len(self):
            return 0
        longest = len(self[int(self.lengths.argmax())])
        others = np.flatnonzero(self.lengths > longest)  # a string has no more characters than bytes
        for index in others[np.argsort(-self.lengths[others])].tolist():
            if self.lengths[index] <= longest:
                break
            longest = max(longest, len(self[index]))
        return longest

    @property
    def can_be_searched(self) -> bool:
        """Whether `find` works: no string is too long, and no two have the same hash, so none are equal."""
        return self.longest <= LONGEST and not bool((self._table[0][1:] == self._table[0][:-1]).any())

    def find(self, texts: "Strings") -> Places:
        """Return the index of each text, -1 for texts that are not among the strings. The strings must be
        searchable."""
        found = np.full(len(texts), -1, np.int64)
        short = np.flatnonzero(texts.lengths <= self.longest)
        if not len(self) or not len(short):
            return found
        sorted_hashes, order = self._table
        hashes = _hashes(texts._padded, texts.starts[short], texts.lengths[short])
        place = np.minimum(np.searchsorted(sorted_hashes, hashes), len(self) - 1)
        same = sorted_hashes[place] == hashes
        short = short[same]
        candidates = order[place[same]]
        found[short] = np.where(self._equal(candidates, texts, short), candidates, -1)
        return found

    def _equal(self, own: Places, texts: "Strings", others: Places) -> npt.NDArray[np.bool_]:
        """Whether strings with the same hash are equal."""
        lengths = self.lengths[own]
        equal: npt.NDArray[np.bool_] = lengths == texts.lengths[others]
        for first in range(0, int(lengths.max(initial=0)), _WORD):
            rest = np.flatnonzero(equal & (lengths > first))
            one = _words(self._padded, self.starts[own[rest]] + first, lengths[rest] - first)
            equal[rest] = one == _words(texts._padded, texts.starts[others[rest]] + first, lengths[rest] - first)
        return equal

    @cached_property
    def _table(self) -> tuple[Hashes, Places]:
        """Return the hashes in ascending order, and the indices of their strings."""
        hashes = _hashes(self._padded, self.starts, np.minimum(self.lengths, LONGEST))
        order = np.argsort(hashes)
        return hashes[order], order


def _joined(texts: Iterable[str]) -> tuple[Bytes, Places, Places]:
    encoded = [text.encode() for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum(lengths) - lengths, lengths


def _is_utf8(data: Bytes, starts: Places, lengths: Places) -> bool:
    """Whether each string is valid UTF-8: all of the data is, and none begins or ends within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()  # decoding all of it at once takes twice as long
    try:
        for begin in range(0, len(data), _PIECE):
            decoder.decode(data[begin : begin + _PIECE].tobytes())
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    bounds = np.concatenate([starts, starts + lengths])
    return not bool(((data[bounds[bounds < len(data)]] & 0xC0) == 0x80).any())


def _words(padded: Bytes, starts: Places, lengths: Places) -> Hashes:
    """Return up to eight first bytes of each string as a number."""
    windows = np.ndarray((len(padded) - _WORD + 1,), "<u8", padded, strides=(1,))
    unused = np.maximum(_WORD - lengths, 0).astype(np.uint64) * np.uint64(8)
    values: Hashes = windows[starts] & (np.uint64(2**64 - 1) >> unused)
    return values


def _hashes(padded: Bytes, starts: Places, lengths: Places) -> Hashes:
    hashes = lengths.astype(np.uint64)
    for first in range(0, int(lengths.max(initial=0)), _WORD):
        rest = np.flatnonzero(lengths > first)
        mixed = (hashes[rest] ^ _words(padded, starts[rest] + first, lengths[rest] - first)) * _MIX
        hashes[rest] = mixed ^ (mixed >> _SHIFT)
    return hashes
