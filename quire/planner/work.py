"""What a step computes, as far as its time depends on it: plain numbers of a step of the scheduler."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Window = int | None  # the number of tokens that a query sees, None for all


class StepWork(NamedTuple):
    """The work of a step.

    tokens: computed. requests: with tokens. places: at which a token is sampled. read: for each window of the model's
    layers, the cached tokens that requests with one token read, those tokens included. prompts: requests with several
    tokens. pairs: for each window, pairs of a query of such a request and a key that it sees. keys: for each window,
    the keys that at least one of its queries sees.
    """

    tokens: int
    requests: int
    places: int
    read: tuple[int, ...]
    prompts: int
    pairs: tuple[int, ...]
    keys: tuple[int, ...]


def step_work(ends: Sequence[int], counts: Sequence[int], places: int, windows: Sequence[Window]) -> StepWork:
    """ends: of each request, its tokens that are computed when the step has ended. counts: those of the step."""
    tokens = sum(counts)
    requests = len(counts)
    if tokens == requests:  # each has one
        read = tuple(sum(ends) if window is None else _seen(ends, window) for window in windows)
        none = (0,) * len(windows)
        return StepWork(tokens, requests, places, read, 0, none, none)
    ones = [end for end, count in zip(ends, counts, strict=True) if count == 1]
    others = [(end, count) for end, count in zip(ends, counts, strict=True) if count > 1]
    return StepWork(
        tokens,
        requests,
        places,
        tuple(sum(ones) if window is None else _seen(ones, window) for window in windows),
        len(others),
        tuple(sum(pairs(end - count, count, window) for end, count in others) for window in windows),
        tuple(
            sum(end if window is None else min(end, count + window - 1) for end, count in others) for window in windows
        ),
    )


def pairs(start: int, count: int, window: Window) -> int:
    """Pairs of a query at positions start, ..., start + count - 1 and a key that it sees, with a window or without."""
    rising = count if window is None else max(0, min(count, window - start))  # queries that see all before them
    return rising * start + rising * (rising + 1) // 2 + (count - rising) * (window or 0)


def _seen(contexts: Sequence[int], window: int) -> int:
    return int(np.minimum(contexts, window).sum())
