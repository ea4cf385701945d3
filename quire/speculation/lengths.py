"""Chooses how many drafts to verify, from the recent acceptance rate and the time that steps take."""

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from itertools import accumulate

from quire.messages.step import StepCosts

_UNKNOWN = StepCosts()
_PRIOR = 0.7  # the initial acceptance of a request
_WEIGHT = 0.15  # weight of the newest verification in a request's acceptance
_RECOVERY = 0.03  # share by which acceptance returns to the prior per step without drafts, to try them again
_LEVELS = 20  # acceptance is rounded to this many levels
_GAIN = 1.1  # required speedup, since the costs are not known exactly


class Acceptance:
    """The probability that a request's draft is accepted, given that all drafts before it were accepted."""

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
        """most: the maximum number of drafts. If the costs of steps are unknown, a request always gets this many."""
        self.most = most
        self._knows_costs = bool(costs.steps)
        self._step, self._first, self._next = map(_Seconds, (costs.steps, costs.first_draft, costs.next_draft))
        self.best = cache(self._best)

    def __call__(self, num_requests: int, acceptance: Acceptance) -> int:
        if not self._knows_costs:
            return self.most
        return self.best(num_requests, round(acceptance.value * _LEVELS))

    def _best(self, num_requests: int, level: int) -> int:
        """Return the number of drafts with which a step of `num_requests` requests generates the most tokens per
        second.

        With acceptance p, k drafts give 1 + p + ... + p^k tokens on average.
        """
        powers = [(level / _LEVELS) ** count for count in range(self.most + 1)]
        speeds = [tokens / self._seconds(num_requests, count) for count, tokens in enumerate(accumulate(powers))]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] >= _GAIN * speeds[0] else 0

    def _seconds(self, num_requests: int, count: int) -> float:
        """Return the time to create and verify `count` drafts for each request."""
        making = self._first(num_requests) + (count - 1) * self._next(num_requests) if count else 0.0
        return self._step(num_requests * (1 + count)) + making


class _Seconds:
    """Measured times by size. Times between two sizes are interpolated; beyond the largest size, they grow in
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
