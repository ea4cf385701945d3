"""The interface of proposers that run on the host and need nothing but the tokens of a text."""

from collections.abc import Sequence
from typing import Protocol


class Text(Protocol):
    """A request, as a proposer sees it. Tokens are only ever appended to a text."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int

    @property
    def cache_salt(self) -> str | None:
        """Texts with different salts must not learn anything of each other."""


class Proposer(Protocol):
    """Guesses the tokens that follow texts. Guesses may be wrong: a request's answer does not depend on them."""

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        """The next tokens of each text, at most most[i] for texts[i]; [] for a text whose future is unknown."""

    def finish(self, text: Text) -> None:
        """The text is complete, or its request has ended for another reason."""
