"""The interface of a back end: a library that compiles constraints, and says which tokens may follow."""

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
        """Move on by a token. Returns False if the grammar does not allow it; the matcher is then of no further use."""

    def forced(self) -> list[int]:
        """The tokens that follow in any case, as the tokenizer would write their text; [] in most states."""

    def fork(self) -> "Matcher":
        """A copy, to follow a text that may turn out otherwise."""

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete, so that only end-of-sequence may follow."""

    @property
    def error(self) -> str | None:
        """Why the matcher cannot go on; None while it can."""


class TokenTable(msgspec.Struct, frozen=True, dict=True):
    """The tokens of a model, as plain data for another process: the fields of a Vocabulary, which explains them."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]
    bos_token_id: int | None

    is_tokenizer_wrapper: ClassVar[bool] = True  # llguidance asks for it

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def eos_token_id(self) -> int:
        return self.eos_token_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text: the longest ones, which are not always the tokenizer's. [] if there are none."""
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
        """Token → its id, and the length of the longest token."""
        special = set(self.special_token_ids)
        ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        return ids, max(map(len, ids), default=0)


class Backend(Protocol):
    """A library for one tokenizer. Its methods may be called from any thread.

    They are made with (vocabulary, compact, closed). compact: JSON has no spaces. closed: objects have no properties
    besides those that a schema lists.
    """

    def source(self, params: StructuredOutputsParams) -> bytes:
        """The constraint in a form that `load` reads, also in another process. It may take any time and memory.

        Raises ValueError with the reason if the constraint is wrong, too large, or not supported, or does not work.
        """

    def load(self, source: bytes) -> Matcher:
        """The state at the beginning of a text. Requests with equal parameters share it, and each works with a fork.

        Raises ValueError.
        """

    def compile(self, params: StructuredOutputsParams) -> Matcher:
        """All of it in this process: for constraints that are trusted."""
        return self.load(self.source(params))

    def fill(self, matchers: Sequence[Any], bits: "np.ndarray") -> None:
        """Write which tokens may follow, for each matcher one row of bits: int32 [matchers, ceil(vocab_size / 32)]."""
