"""How many drafts are worth verifying, from the share that was accepted lately and from the time that steps take."""

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from itertools import accumulate

from quire.messages.step import StepCosts

_UNKNOWN = StepCosts()
_PRIOR = 0.7  # the acceptance of a request about which nothing is known
_WEIGHT = 0.15  # of the newest verification, in a request's acceptance
_RECOVERY = 0.03  # how far the acceptance goes back to the prior in a step without drafts, so that they are tried again
_LEVELS = 20  # acceptance is rounded to so many levels
_GAIN = 1.1  # speculation has to promise so much, since the costs are not known exactly


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

    def __init__(self, most: int, costs: StepCosts = _UNKNOWN) -> None:
        """most: of drafts. If the costs of steps are not known, a request always gets the most drafts."""
        self.most = most
        self._knows_costs = bool(costs.steps)
        self._step, self._first, self._next = map(_Seconds, (costs.steps, costs.first_draft, costs.next_draft))
        self.best = cache(self._best)

    def __call__(self, num_requests: int, acceptance: Acceptance) -> int:
        if not self._knows_costs:
            return self.most
        return self.best(num_requests, round(acceptance.value * _LEVELS))

    def _best(self, num_requests: int, level: int) -> int:
        """The number of drafts with which a step of so many requests gives the most tokens in a second.

        With the acceptance p, k drafts give 1 + p + ... + p^k tokens on average.
        """
        powers = [(level / _LEVELS) ** count for count in range(self.most + 1)]
        speeds = [tokens / self._seconds(num_requests, count) for count, tokens in enumerate(accumulate(powers))]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] >= _GAIN * speeds[0] else 0

    def _seconds(self, num_requests: int, count: int) -> float:
        """How long it takes to make and to verify `count` drafts for each request."""
        making = self._first(num_requests) + (count - 1) * self._next(num_requests) if count else 0.0
        return self._step(num_requests * (1 + count)) + making


class _Seconds:
    """Measured times, by a size. Times between two sizes are interpolated; beyond the largest size, they grow in
    proportion to it."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self.sizes = sorted(measured)
        self.seconds = [measured[size] for size in self.sizes]

    def __call__(self, size: int) -> float:
        if not self.sizes:
            return 0.0
        above = bisect_left(self.sizes, size)
        if above == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        if above == 0:
            return self.seconds[0]
        (left, right), (start, end) = self.sizes[above - 1 : above + 1], self.seconds[above - 1 : above + 1]
        return start + (end - start) * (size - left) / (right - left)
