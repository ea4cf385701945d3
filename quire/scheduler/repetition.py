"""Detects repetitive output, so that its request can be ended."""

from collections import defaultdict
from collections.abc import Iterable

from quire.messages.sampling_params import RepetitionDetectionParams


class RepetitionDetector:
    """Reads the output of one request, token by token.

    For each pattern size it counts how many of the last tokens in a row were equal to the token `size` positions
    before. For "abcXYXYXY" and size 2, the count is 4: the pattern XY occurs 4 / 2 + 1 = 3 times at the end. The time
    for a token is proportional to its number of occurrences among the max_pattern_size tokens before it, however long
    the output and the repetition are.
    """

    def __init__(self, params: RepetitionDetectionParams, output: Iterable[int] = ()) -> None:
        """output: the tokens generated so far."""
        self._smallest = max(params.min_pattern_size, 1)
        self._largest = params.max_pattern_size
        self._min_repeats = params.min_count - 1  # occurrences of a pattern after its first one
        self._length = 0  # of the output
        self._positions: defaultdict[int, list[int]] = defaultdict(list)  # by token
        self._equal: dict[int, int] = {}  # counts by pattern size; a missing size has 0
        for token in output:
            self.append(token)

    def append(self, token: int) -> bool:
        """Append a token. Returns whether the output now ends with min_count occurrences of a pattern."""
        positions = self._positions[token]
        previous = self._equal
        equal = {}
        for position in reversed(positions):
            size = self._length - position
            if size > self._largest:
                break
            if size >= self._smallest:
                equal[size] = previous.get(size, 0) + 1
        positions.append(self._length)
        self._length += 1
        self._equal = equal
        return any(count >= size * self._min_repeats for size, count in equal.items())
