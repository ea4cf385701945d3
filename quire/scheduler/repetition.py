"""Finds output that repeats itself, so that its request can be ended."""

from collections import defaultdict
from collections.abc import Iterable

from quire.messages.sampling_params import RepetitionDetectionParams


class RepetitionDetector:
    """Looks at one request's output, token by token.

    For each pattern size it counts for how many tokens the output has been equal to itself `size` tokens before. With
    "abcXYXYXY", that is 4 for size 2: the pattern XY stands there 4 / 2 + 1 = 3 times. A token costs as much as it
    occurs among the max_pattern_size tokens before it, however long the output and the repetition are.
    """

    def __init__(self, params: RepetitionDetectionParams, output: Iterable[int] = ()) -> None:
        """output: tokens that were generated before."""
        self._smallest, self._largest = max(params.min_pattern_size, 1), params.max_pattern_size
        self._further = params.min_count - 1  # times that a pattern stands before its last one
        self._length = 0  # of the output
        self._positions: defaultdict[int, list[int]] = defaultdict(list)  # by token
        self._equal: dict[int, int] = {}  # by pattern size; sizes that are not here have 0
        for token in output:
            self.append(token)

    def append(self, token: int) -> bool:
        """Whether the output, with this token at its end, ends with a pattern that stands there min_count times."""
        positions, before, equal = self._positions[token], self._equal, {}
        for position in reversed(positions):
            size = self._length - position
            if size > self._largest:
                break
            if size >= self._smallest:
                equal[size] = before.get(size, 0) + 1
        positions.append(self._length)
        self._length += 1
        self._equal = equal
        return any(count >= size * self._further for size, count in equal.items())
