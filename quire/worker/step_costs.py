"""Measures the time of steps and drafts. The scheduler uses it to decide how many drafts are worth their cost."""

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from quire.layers.step_inputs import StepSize
from quire.messages.step import StepCosts
from quire.parallel.mesh import Communicator
from quire.worker.drafters.drafter import NoDrafter
from quire.worker.drafters.step import SampledStep
from quire.worker.model_runner import ModelRunner
from quire.worker.runner import Runner

_SIZES = tuple(1 << n for n in range(10))  # tokens of steps, and requests that get drafts
_RUNS = 8
_SATURATED = 0.9  # twice as many tokens take at least this fraction of twice the time
_SECONDS = 4.0  # after this time, measure no larger sizes and repeat none


@torch.inference_mode()
def step_costs(runner: Runner[Any], most_tokens: int, most_drafts: int, group: Communicator) -> StepCosts:
    """Return the costs of dummy steps, and of the drafts after them if there is a drafter. group: the ranks that run
    them."""
    costs = StepCosts(_step_seconds(runner, most_tokens, group))
    if not isinstance(runner, ModelRunner) or isinstance(runner.drafter, NoDrafter):
        return costs
    sizes = [size for size in costs.steps if size <= len(runner.batch.num_tokens)]
    sizes = [size for size in sizes if size * (1 + most_drafts) <= most_tokens] or [1]
    firsts = dict.fromkeys(sizes, math.inf)
    alls = dict.fromkeys(sizes, math.inf)
    for _ in range(_RUNS):
        for size in sizes:
            firsts[size] = min(firsts[size], _draft_seconds(runner, size, 1))
            alls[size] = min(alls[size], _draft_seconds(runner, size, most_drafts))
    first = convex(firsts)
    last = convex(alls)
    for size in sizes:
        costs.first_draft[size] = first[size]
        costs.next_draft[size] = max(0.0, last[size] - first[size]) / max(1, most_drafts - 1)
    return costs


def convex(measured: Mapping[int, float]) -> dict[int, float]:
    """Return the largest convex function of the size that does not exceed any measured time.

    True times are nearly convex: at first constant, dominated by reading weights, and then proportional to the size.
    Disturbances only increase them.
    """
    hull: list[tuple[int, float]] = []
    for size, seconds in sorted(measured.items()):
        while len(hull) > 1 and _slope(*hull[-2:]) >= _slope(hull[-1], (size, seconds)):
            hull.pop()
        hull.append((size, seconds))
    sizes, times = zip(*hull, strict=True)
    return {size: float(np.interp(size, sizes, times)) for size in measured}


def _slope(start: tuple[int, float], end: tuple[int, float]) -> float:
    return (end[1] - start[1]) / (end[0] - start[0])


def _draft_seconds(runner: ModelRunner, requests: int, count: int) -> float:
    """Return the time of making `count` drafts after a step that has verified as many."""
    size = runner.forward.fit(StepSize(requests * (1 + count), requests, 1 + count))
    inputs = runner.staging.stage_dummy(size)
    target = runner.model.kernels.target
    hidden = torch.zeros(size.tokens, runner.model.hidden_size, dtype=target.dtype, device=target.device)
    began = time.perf_counter()
    drafts = runner.drafter.draft(SampledStep.dummy(inputs, hidden, requests), count)
    assert drafts is not None
    runner.device.download(drafts)()  # waits
    return time.perf_counter() - began


def _step_seconds(runner: Runner[Any], most_tokens: int, group: Communicator) -> dict[int, float]:
    """Return the times of dummy steps (forward and logits) in seconds, by tokens. The times of larger steps are
    proportional to the last one."""
    began = time.perf_counter()
    measured = dict[int, float]()
    most_requests = len(runner.batch.num_tokens)

    def agree(is_true: bool) -> bool:
        return group.minimum(int(is_true)) == 1  # ranks measure different times

    def seconds(tokens: int) -> float:
        size = StepSize(tokens, tokens, 1) if tokens <= most_requests else StepSize(tokens, most_requests)
        return _seconds(runner, size, tokens)

    for tokens in (size for size in _SIZES if size <= most_tokens):
        measured[tokens] = min(seconds(tokens) for _ in range(3))
        half = measured.get(tokens // 2)
        is_saturated = half is not None and measured[tokens] >= 2 * _SATURATED * half
        if not agree(not is_saturated and time.perf_counter() - began < _SECONDS):
            break
    # A disturbance may have ended before a later run.
    for _ in range(3, _RUNS):
        if not agree(time.perf_counter() - began < _SECONDS):
            break
        measured = {tokens: min(before, seconds(tokens)) for tokens, before in measured.items()}
    return convex(measured)


def _seconds(runner: Runner[Any], size: StepSize, places: int) -> float:
    inputs = runner.staging.stage_dummy(runner.forward.fit(size))
    began = time.perf_counter()
    result = runner.forward(inputs)[:places]
    if runner.model.stage.has_head:
        result = runner.model.logits(result).argmax(-1)
    runner.device.download(result)()  # waits
    return time.perf_counter() - began
