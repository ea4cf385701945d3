"""Measures how long steps take, by their number of tokens. The scheduler needs it to know what drafts cost."""

import time

import torch

from quire.layers.step_inputs import StepSize
from quire.parallel.mesh import Communicator
from quire.worker.model_runner import ModelRunner

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_RUNS = 4
_SATURATED = 0.9  # a step of twice as many tokens takes at least this share of twice the time
_SECONDS = 3.0  # measure no larger sizes after this time


@torch.inference_mode()
def step_seconds(runner: ModelRunner, most_tokens: int, group: Communicator) -> dict[int, float]:
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
