"""The interface of a back end: a library that compiles constraints and computes which tokens may follow."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from quire.messages.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np


class Matcher(Protocol):
    """The state of one sequence in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False if the grammar does not allow it; the matcher must not be used
        afterwards."""

    def forced(self) -> list[int]:
        """Return the tokens that must follow, as the tokenizer would encode their text; [] in most states."""

    def fork(self) -> "Matcher":
        """Return a copy, to follow a possible continuation of the text."""

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete, so that only end-of-sequence may follow."""

    @property
    def error(self) -> str | None:
        """The reason why the matcher cannot continue; None while it can."""


class TokenTable(msgspec.Struct, frozen=True, dict=True):
    """The tokens of a model, as plain data for another process. See Vocabulary for the fields."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]
    bos_token_id: int | None

    is_tokenizer_wrapper: ClassVar[bool] = True  # required by llguidance

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def eos_token_id(self) -> int:
        return self.eos_token_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode a text with the longest tokens, which may differ from the tokenizer's. [] if there are none."""
        data = text.encode() if isinstance(text, str) else text
        ids, longest = self._ids
        found: list[int] = []
        start = 0
        while start < len(data):
            lengths = range(min(longest, len(data) - start), 0, -1)
            length = next((length for length in lengths if data[start : start + length] in ids), 0)
            if not length:
                return []
            found.append(ids[data[start : start + length]])
            start += length
        return found

    @cached_property
    def _ids(self) -> tuple[dict[bytes, int], int]:
        """Return token → id, and the length of the longest token."""
        special = set(self.special_token_ids)
        ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        return ids, max(map(len, ids), default=0)


class Backend(Protocol):
    """A library for one tokenizer. Its methods may be called from any thread.

    It is constructed with (vocabulary, compact, closed). compact: JSON has no spaces. closed: objects have only
    properties that a schema lists.
    """

    def source(self, params: StructuredOutputsParams) -> bytes:
        """Compile the constraint to a form that `load` reads, also in another process. Time and memory are unbounded.

        Raises ValueError with the reason if the constraint is invalid, too large, not supported or does not work.
        """

    def load(self, source: bytes) -> Matcher:
        """Return the state at the beginning of a text. Requests with equal parameters share it, and each uses a fork.

        Raises ValueError.
        """

    def compile(self, params: StructuredOutputsParams) -> Matcher:
        """Compile and load in this process, for trusted constraints."""
        return self.load(self.source(params))

    def fill(self, matchers: Sequence[Any], bits: "np.ndarray") -> None:
        """Write one row of bits for each matcher: the tokens that may follow. int32 [matchers, ceil(vocab_size /
        32)]."""
