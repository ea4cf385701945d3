"""Measures how long steps and drafts take. The scheduler needs it to know how many drafts are worth their cost."""

import time

import torch

from quire.layers.step_inputs import StepSize
from quire.messages.step import StepCosts
from quire.parallel.mesh import Communicator
from quire.worker.drafters.step import SampledStep
from quire.worker.model_runner import ModelRunner

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_RUNS = 4
_SATURATED = 0.9  # a step of twice as many tokens takes at least this share of twice the time
_SECONDS = 3.0  # measure no larger sizes after this time


@torch.inference_mode()
def step_costs(runner: ModelRunner, most_tokens: int, most_drafts: int, group: Communicator) -> StepCosts:
    """The costs of dummy steps, and of the drafts behind them if there is a drafter."""
    costs = StepCosts(_step_seconds(runner, most_tokens, group))
    if runner.drafter is not None:
        for requests in (size for size in costs.steps if size <= len(runner.batch.num_tokens)):
            first = min(_draft_seconds(runner, requests, 1) for _ in range(_RUNS))
            all_drafts = min(_draft_seconds(runner, requests, most_drafts) for _ in range(_RUNS))
            costs.first_draft[requests] = first
            costs.next_draft[requests] = max(0.0, all_drafts - first) / max(1, most_drafts - 1)
    return costs


def _draft_seconds(runner: ModelRunner, requests: int, count: int) -> float:
    assert runner.drafter is not None
    inputs = runner.staging.stage_dummy(runner.forward.fit(StepSize(requests, requests, 1)))
    hidden = runner.forward(inputs)
    began = time.perf_counter()
    drafts = runner.drafter.draft(SampledStep.dummy(inputs, hidden, requests), count)
    assert drafts is not None
    runner.device.download(drafts)()  # waits
    return time.perf_counter() - began


def _step_seconds(runner: ModelRunner, most_tokens: int, group: Communicator) -> dict[int, float]:
    """The time of dummy steps, forward and logits, in seconds. Larger steps take as long in proportion to the last."""
    began, measured, longest = time.perf_counter(), {}, 0.0
    most_requests = len(runner.batch.num_tokens)
    for tokens in _SIZES:
        if tokens > most_tokens:
            break
        size = StepSize(tokens, tokens, 1) if tokens <= most_requests else StepSize(tokens, most_requests)
        # What takes less time than fewer tokens was disturbed less.
        longest = measured[tokens] = max(longest, min(_seconds(runner, size, tokens) for _ in range(_RUNS)))
        half = measured.get(tokens // 2)
        is_saturated = half is not None and measured[tokens] >= 2 * _SATURATED * half
        if group.minimum(int(not is_saturated and time.perf_counter() - began < _SECONDS)) == 0:
            break
    return measured


def _seconds(runner: ModelRunner, size: StepSize, places: int) -> float:
    inputs = runner.staging.stage_dummy(runner.forward.fit(size))
    began = time.perf_counter()
    tokens = runner.model.logits(runner.forward(inputs)[:places]).argmax(-1)
    runner.device.download(tokens)()  # waits
    return time.perf_counter() - began
