"""Collects responses for the semantic cache."""

from collections.abc import Sequence

from quire.semantic.cache import Answer
from quire.semantic.router import Decision

Header = tuple[bytes, bytes]
_KEPT = frozenset((b"content-type", b"content-encoding", b"content-language"))


class Recorder:
    """Collects one response, up to `largest` bytes. The methods are called in their order here."""

    def __init__(self, decision: Decision, largest: int) -> None:
        self._decision = decision
        self._left = largest
        self._chunks: list[bytes] = []
        self._headers: tuple[Header, ...] = ()

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        if status != 200:
            self._left = -1
        self._headers = tuple(pair for pair in headers if pair[0] in _KEPT)

    def add(self, chunk: bytes) -> None:
        self._left -= len(chunk)
        if self._left >= 0:
            self._chunks.append(chunk)
        else:
            self._chunks.clear()

    def end(self) -> None:
        """Store the response, since it is complete."""
        if self._left >= 0 and self._decision.remember is not None:
            self._decision.remember(Answer(self._headers, b"".join(self._chunks)))
