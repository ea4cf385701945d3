"""Finds output that repeats itself, so that its request can be ended."""

from collections.abc import Iterable

from quire.messages.sampling_params import RepetitionDetectionParams


class RepetitionDetector:
    """Looks at one request's output, token by token.

    For each pattern size it counts for how many tokens the output has been equal to itself `size` tokens before. With
    "abcXYXYXY", that is 4 for size 2: the pattern XY stands there 4 / 2 + 1 = 3 times. A token costs one comparison a
    pattern size, however long the output and the repetition are.
    """

    def __init__(self, params: RepetitionDetectionParams, output: Iterable[int] = ()) -> None:
        """output: tokens that were generated before."""
        self._sizes = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
        self._min_count = params.min_count
        self._tokens: list[int] = []
        self._equal = [0] * (params.max_pattern_size + 1)  # by pattern size
        for token in output:
            self.append(token)

    def append(self, token: int) -> bool:
        """Whether the output, with this token at its end, ends with a pattern that stands there min_count times."""
        tokens, equal, found = self._tokens, self._equal, False
        for size in self._sizes:
            if size > len(tokens):
                break
            equal[size] = equal[size] + 1 if tokens[-size] == token else 0
            found = found or equal[size] >= size * (self._min_count - 1)
        tokens.append(token)
        return found
