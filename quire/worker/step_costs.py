"""Measures how long steps and drafts take. The scheduler needs it to know how many drafts are worth their cost."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch

from quire.layers.step_inputs import StepSize
from quire.messages.step import StepCosts
from quire.parallel.mesh import Communicator
from quire.worker.drafters.step import SampledStep
from quire.worker.model_runner import ModelRunner

Size = TypeVar("Size")
_SIZES = tuple(1 << n for n in range(10))  # tokens of steps, and requests that get drafts
_RUNS = 4
_SATURATED = 0.9  # a step of twice as many tokens takes at least this share of twice the time
_SECONDS = 3.0  # measure no larger sizes, and no size again, after this time


@torch.inference_mode()
def step_costs(runner: ModelRunner, most_tokens: int, most_drafts: int, group: Communicator) -> StepCosts:
    """The costs of dummy steps, and of the drafts behind them if there is a drafter."""
    costs = StepCosts(_step_seconds(runner, most_tokens, group))
    if runner.drafter is not None:
        sizes = [size for size in costs.steps if size <= len(runner.batch.num_tokens)]
        sizes = [size for size in sizes if size * (1 + most_drafts) <= most_tokens]
        firsts = _best([(size, 1) for size in sizes], lambda size: _draft_seconds(runner, *size))
        alls = _best([(size, most_drafts) for size in sizes], lambda size: _draft_seconds(runner, *size))
        for size in sizes:
            first, last = firsts[size, 1], alls[size, most_drafts]
            costs.first_draft[size] = first
            costs.next_draft[size] = max(0.0, last - first) / max(1, most_drafts - 1)
    return costs


def _best(sizes: Sequence[Size], seconds: Callable[[Size], float]) -> dict[Size, float]:
    """The least time of each size. Its runs are not one after the other: what disturbs one may not disturb the next."""
    rounds = [{size: seconds(size) for size in sizes} for _ in range(_RUNS)]
    return {size: min(times[size] for times in rounds) for size in sizes}


def _draft_seconds(runner: ModelRunner, requests: int, count: int) -> float:
    """The time of making `count` drafts, behind a step that has verified as many."""
    assert runner.drafter is not None
    size = runner.forward.fit(StepSize(requests * (1 + count), requests, 1 + count))
    inputs = runner.staging.stage_dummy(size)
    target = runner.model.kernels.target
    hidden = torch.zeros(size.tokens, runner.model.hidden_size, dtype=target.dtype, device=target.device)
    began = time.perf_counter()
    drafts = runner.drafter.draft(SampledStep.dummy(inputs, hidden, requests), count)
    assert drafts is not None
    runner.device.download(drafts)()  # waits
    return time.perf_counter() - began


def _step_seconds(runner: ModelRunner, most_tokens: int, group: Communicator) -> dict[int, float]:
    """The time of dummy steps, forward and logits, in seconds. Larger steps take as long in proportion to the last."""
    began, measured = time.perf_counter(), dict[int, float]()
    most_requests = len(runner.batch.num_tokens)

    def agree(is_true: bool) -> bool:
        return group.minimum(int(is_true)) == 1  # ranks measure different times

    def seconds(tokens: int) -> float:
        size = StepSize(tokens, tokens, 1) if tokens <= most_requests else StepSize(tokens, most_requests)
        return _seconds(runner, size, tokens)

    for tokens in (size for size in _SIZES if size <= most_tokens):
        measured[tokens] = min(seconds(tokens), seconds(tokens))
        half = measured.get(tokens // 2)
        is_saturated = half is not None and measured[tokens] >= 2 * _SATURATED * half
        if not agree(not is_saturated and time.perf_counter() - began < _SECONDS):
            break
    # What disturbed one run may not disturb the next one, if it comes later.
    for _ in range(2, _RUNS):
        if agree(time.perf_counter() - began < _SECONDS):
            measured = {tokens: min(before, seconds(tokens)) for tokens, before in measured.items()}
    # More tokens take no less time than fewer.
    return dict(zip(measured, accumulate(measured.values(), max), strict=True))


def _seconds(runner: ModelRunner, size: StepSize, places: int) -> float:
    inputs = runner.staging.stage_dummy(runner.forward.fit(size))
    began = time.perf_counter()
    tokens = runner.model.logits(runner.forward(inputs)[:places]).argmax(-1)
    runner.device.download(tokens)()  # waits
    return time.perf_counter() - began
