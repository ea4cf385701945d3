"""The interface of proposers that run on the host and need only the tokens of a text."""

from collections.abc import Sequence
from typing import Protocol


class Text(Protocol):
    """The view of a request for proposers. Tokens are only ever appended to a text."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int

    @property
    def cache_salt(self) -> str | None:
        """The cache salt. Texts with different salts must not influence each other."""


class Proposer(Protocol):
    """Proposes the next tokens of texts. Proposals may be wrong: a request's output does not depend on them."""

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        """Return the proposed next tokens of each text, at most most[i] for texts[i]; [] without a proposal."""

    def finish(self, text: Text) -> None:
        """Handle the end of a text: it is complete, or its request has ended for another reason."""
