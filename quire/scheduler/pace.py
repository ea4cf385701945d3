"""How many tokens a step may have while others wait for their next token."""

from collections.abc import Sequence

from quire.scheduler.request import Request

_FIRST_GUESS = 64
_LEAST = 16  # tokens, so that prompts always get on


class Pace:
    """Finds the number of tokens with which a step takes `seconds`.

    A step's time grows with its tokens, from what reading the weights takes. The number is multiplied with the asked
    time over the time of the last step that had about so many tokens: if the time is a + b n, that leads to the n with
    a + b n = seconds. A single step at most halves it, or makes it half as large again, since steps may be disturbed.
    """

    def __init__(self, seconds: float, first_guess: int = _FIRST_GUESS) -> None:
        """first_guess: the number of tokens to begin with."""
        self.seconds = seconds
        self.tokens = float(max(_LEAST, first_guess))

    def limit(self, most: int, running: Sequence[Request]) -> int:
        """The most tokens of the next step. most: if none of the running requests is past its prompt."""
        if all(request.num_computed_tokens < request.num_prompt_tokens for request in running):
            return most
        return min(most, len(running) + int(self.tokens))

    def observe(self, tokens: int, running: int, seconds: float) -> None:
        """Learn from a step. running: its requests."""
        tokens -= running
        if tokens >= 0.75 * self.tokens:
            fitting = tokens * self.seconds / max(seconds, 1e-6)
            self.tokens = max(_LEAST, min(max(fitting, self.tokens / 2), self.tokens * 1.5))
