"""From a step's inputs to hidden states."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.layers.forward_state import ForwardState
from quire.layers.step_inputs import StepInputs, StepSize
from quire.models.model import Model


class Forward:
    """Calls every kernel anew. backends: one for each KV group.

    taps: where to write hidden states of chosen layers, see Model.forward. To be set before the first step.
    """

    def __init__(self, model: Model, backends: Sequence[AttentionBackend]) -> None:
        self.model, self.backends = model, backends
        self.taps: dict[int, Tensor] = {}

    def fit(self, size: StepSize) -> StepSize:
        """The size that a step of this size is to be padded to."""
        return size

    def __call__(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Hidden states: [tokens, hidden], or of `rows` alone, valid until the next call"""
        return self.layers(self.embed(inputs), inputs, rows)

    def embed(self, inputs: StepInputs) -> Tensor:
        """What the first layer gets: [tokens, hidden]. Recorded steps and CUDA graphs begin behind it."""
        return self.model.embed(inputs.input_ids, inputs.positions)

    def layers(self, x: Tensor, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Hidden states. x: what `embed` gives"""
        return self.model.forward(x, self.state(inputs), rows, self.taps)

    def state(self, inputs: StepInputs) -> ForwardState:
        rotary = [table(inputs.positions) for table in self.model.rotary]
        return ForwardState(inputs, rotary, self.plan(inputs))

    def plan(self, inputs: StepInputs, over: Sequence[Any] | None = None) -> list[Any]:
        """A plan for each KV group. over: plans of another step of this size, to be overwritten."""
        groups = zip(self.backends, inputs.layouts(), over or [None] * len(self.backends), strict=True)
        return [backend.plan(layout, plan) for backend, layout, plan in groups]
