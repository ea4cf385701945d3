"""The interface of a back end: a library that compiles constraints, and says which tokens may follow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

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


class Backend(Protocol):
    """A library for one tokenizer. Its methods may be called from any thread.

    They are made with (vocabulary, compact, closed). compact: JSON has no spaces. closed: objects have no properties
    besides those that a schema lists.
    """

    def compile(self, params: StructuredOutputsParams) -> Matcher:
        """The state at the beginning of a text. Requests with equal parameters share it, and each works with a fork.

        Raises ValueError with the reason if the constraint is wrong, too large, or not supported.
        """

    def fill(self, matchers: Sequence[Matcher], bits: "np.ndarray") -> None:
        """Write which tokens may follow, for each matcher one row of bits: int32 [matchers, ceil(vocab_size / 32)]."""
