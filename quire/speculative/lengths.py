"""How many drafts are worth verifying, from the share that was accepted lately and from the time that steps take."""

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from itertools import accumulate

_PRIOR = 0.7  # the acceptance of a request about which nothing is known
_WEIGHT = 0.15  # of the newest verification, in a request's acceptance
_RECOVERY = 0.03  # how far the acceptance goes back to the prior in a step without drafts, so that they are tried again
_LEVELS = 20  # acceptance is rounded to so many levels
_GAIN = 1.03  # speculation has to promise so much, since the costs are not known exactly


class Acceptance:
    """The share of a request's drafts that is accepted, by those before it having been accepted."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = _PRIOR

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        for place in range(min(num_drafts, num_accepted + 1)):
            self.value += _WEIGHT * ((place < num_accepted) - self.value)

    def recover(self) -> None:
        self.value += _RECOVERY * (_PRIOR - self.value)


class DraftLengths:
    """The best number of drafts for a request, given the number of requests in the step."""

    def __init__(self, most: int, step_seconds: Mapping[int, float] = {}) -> None:
        """most: of drafts. step_seconds: by number of tokens, how long a step takes. If it is empty, a request always
        gets the most drafts."""
        self.most = most
        self._tokens = sorted(step_seconds)
        self._seconds = [step_seconds[count] for count in self._tokens]
        self.best = cache(self._best)

    def __call__(self, num_requests: int, acceptance: Acceptance) -> int:
        if not self._tokens:
            return self.most
        return self.best(num_requests, round(acceptance.value * _LEVELS))

    def _best(self, num_requests: int, level: int) -> int:
        """The number of drafts with which a step of so many requests gives the most tokens in a second.

        With the acceptance p, k drafts give 1 + p + ... + p^k tokens on average.
        """
        powers = [(level / _LEVELS) ** count for count in range(self.most + 1)]
        speeds = [tokens / self.seconds(num_requests * (1 + count)) for count, tokens in enumerate(accumulate(powers))]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] >= _GAIN * speeds[0] else 0

    def seconds(self, tokens: int) -> float:
        """How long a step of so many tokens takes. Beyond the largest measured one, in proportion to it."""
        above = bisect_left(self._tokens, tokens)
        if above == len(self._tokens):
            return self._seconds[-1] * tokens / self._tokens[-1]
        if above == 0:
            return self._seconds[0]
        (left, right), (start, end) = self._tokens[above - 1 : above + 1], self._seconds[above - 1 : above + 1]
        return start + (end - start) * (tokens - left) / (right - left)
