"""Limits the tokens of a step while other requests wait for their next token."""

from collections.abc import Sequence

from quire.scheduler.request import Request

_FIRST_GUESS = 64
_LEAST = 16  # tokens, so that prompts always make progress


class Pace:
    """Finds the number of tokens with which a step takes `seconds`.

    A step's time is the time to read the weights plus a part that grows with its tokens. The number is multiplied by
    the ratio of the target time to the time of the last step with about that many tokens. If the time is a + b n, this
    converges to the n with a + b n = seconds. A single step changes it at most by a factor between 0.5 and 1.5, since
    steps may be disturbed.
    """

    def __init__(self, seconds: float, first_guess: int = _FIRST_GUESS) -> None:
        """first_guess: the number of tokens to begin with."""
        self.seconds = seconds
        self.tokens = float(max(_LEAST, first_guess))

    def limit(self, most: int, running: Sequence[Request]) -> int:
        """Return the most tokens of the next step. most: the limit if no running request is generating."""
        if all(request.num_computed_tokens < request.num_prompt_tokens for request in running):
            return most
        return min(most, len(running) + int(self.tokens))

    def observe(self, tokens: int, running: int, seconds: float) -> None:
        """Update the limit from a completed step. running: the number of its requests."""
        tokens -= running
        if tokens >= 0.75 * self.tokens:
            fitting = tokens * self.seconds / max(seconds, 1e-6)
            self.tokens = max(_LEAST, min(max(fitting, self.tokens / 2), self.tokens * 1.5))
