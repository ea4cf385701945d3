"""The work of a step that determines its time, as plain numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Window = int | None  # the number of tokens that a query attends to, None for all


class StepWork(NamedTuple):
    """The work of a step.

    tokens: computed tokens. requests: requests with tokens. places: places at which a token is sampled. read: for each
    window of the model's layers, the cached tokens read by requests with one token, including that token. prompts:
    requests with several tokens. pairs: for each window, the query-key pairs of such requests. keys: for each window,
    the keys that at least one of their queries attends to.
    """

    tokens: int
    requests: int
    places: int
    read: tuple[int, ...]
    prompts: int
    pairs: tuple[int, ...]
    keys: tuple[int, ...]


def step_work(ends: Sequence[int], counts: Sequence[int], places: int, windows: Sequence[Window]) -> StepWork:
    """ends: each request's computed tokens after the step. counts: each request's tokens in the step."""
    tokens = sum(counts)
    requests = len(counts)
    if tokens == requests:  # each request has one token
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
    """Return the number of query-key pairs for queries at positions start, ..., start + count - 1, with or without a
    window."""
    rising = count if window is None else max(0, min(count, window - start))  # queries that see all before them
    return rising * start + rising * (rising + 1) // 2 + (count - rising) * (window or 0)


def _seen(contexts: Sequence[int], window: int) -> int:
    return int(np.minimum(contexts, window).sum())
