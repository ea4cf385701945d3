"""An input that is declared in one line arrives wherever steps run: as they come, recorded, captured and padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.step_inputs import StepSize
from quire.messages.step import SchedulerOutput
from quire.ops.cpu.build import library
from quire.worker.graphs import CapturedForward, RecordedForward
from quire.worker.input_batch import FlatBatch, InputBatch
from support.engines import GREEDY, generate, make_llm
from support.late_device import run_late

PROMPTS = [[7 + i] * length for i, length in enumerate([1, 15, 16, 33, 50])]
PARAMS = [GREEDY.clone(max_tokens=6 + 5 * i, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture(autouse=True)
def adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value for each token that tells rows and positions apart, in steps that use no adapter."""
    flatten = InputBatch.flatten

    def with_adapters(self: InputBatch, step: SchedulerOutput) -> FlatBatch:
        flat = flatten(self, step)
        flat.extra_inputs["adapters"] = flat.token_rows * 1000 + flat.positions
        return flat

    monkeypatch.setattr(InputBatch, "flatten", with_adapters)


def watch_layers(model: Any, note: Callable[[Any], None]) -> None:
    """Note the inputs of each forward whose layers Python calls, as the first layer sees them."""
    first = model.layers[0]

    def layer(x: Tensor, residual: Tensor | None, state: Any, rows: Tensor | None = None) -> Any:
        note(state.inputs)
        return first(x, residual, state, rows)

    model.layers[0] = layer


@pytest.mark.skipif(library() is None, reason="the CPU kernels cannot be compiled here")
def test_it_arrives_in_recorded_steps(checkpoints, monkeypatch):
    llm = make_llm(checkpoints.path("llama"), enable_lora=True)
    forward = llm.core.executor.runner.forward
    seen: list[Any] = []
    replays: list[StepSize] = []
    watch_layers(forward.model, seen.append)
    layers = RecordedForward.layers

    def checked(self: RecordedForward, x: Tensor, inputs: Any, rows: Tensor | None = None) -> Tensor:
        is_recorded, calls = inputs.size in self._recorded, len(seen)
        hidden = layers(self, x, inputs, rows)
        if is_recorded:
            assert len(seen) == calls, "a recorded step calls no layer"
            recorded = self._recorded[inputs.size].state.inputs
            assert any(recorded is others for others in seen)
            assert torch.equal(recorded.adapters, inputs.adapters)
            replays.append(inputs.size)
        else:
            assert seen[-1] is inputs
        assert inputs.adapters.remainder(1000).equal(inputs.positions)
        return hidden

    monkeypatch.setattr(RecordedForward, "layers", checked)
    generate(llm, PROMPTS, PARAMS)
    assert len(replays) > 10


def test_it_arrives_in_captured_and_padded_steps(checkpoints):
    llm = make_llm(checkpoints.path("llama"), enable_lora=True, max_num_seqs=6)
    device = run_late(llm, captured=True)
    assert isinstance(device.runner.forward, CapturedForward)
    seen: list[tuple[Tensor, Tensor]] = []
    watch_layers(device.real_model, lambda inputs: seen.append((inputs.adapters.clone(), inputs.positions.clone())))
    generate(llm, PROMPTS, PARAMS)
    num_padded = 0
    for values, positions in seen:
        is_padding = values < 0
        num_padded += int(is_padding.sum())
        assert torch.equal(values[~is_padding].remainder(1000), positions[~is_padding])
        assert (values[is_padding] == -1).all()
        assert not positions[is_padding].any()
    assert num_padded > 20
    assert len(seen) > 25
    assert {len(values) for values, _ in seen} <= {size.tokens for size in device.runner.forward._graphs}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("size", [StepSize(4, 4, 1), StepSize(12, 4, 3), StepSize(100, 4), StepSize(3, 7)])
def test_dummy_steps_have_it_too(checkpoints, is_late, size):
    llm = make_llm(checkpoints.path("llama"), enable_lora=True, max_model_len=64)
    if is_late:
        device = run_late(llm)
        with device.stream:
            inputs = device.runner.staging.stage_dummy(size)
        device.stream.run_until(device.stream.queue[-1])
    else:
        inputs = llm.core.executor.runner.staging.stage_dummy(size)
    assert inputs.size == size
    assert inputs.adapters.tolist() == [-1] * size.tokens
    assert inputs.slot_mapping.eq(-1).all()
    assert inputs.query_start_loc[-1] == size.tokens
    assert inputs.seq_lens.max() == (size.tokens_per_request or min(size.tokens, 64))
