"""From a step's inputs to hidden states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.layers.forward_state import ForwardState
from quire.models.model import Model
from quire.worker.staging import StepInputs


class Forward:
    """Calls every kernel anew. backends: one for each KV group. last_tokens: see Staging.

    taps: where to write hidden states of chosen layers, see Model.forward. To be set before the first step.
    """

    def __init__(self, model: Model, backends: Sequence[AttentionBackend], last_tokens: Tensor | None = None) -> None:
        self.model, self.backends, self.last_tokens = model, backends, last_tokens
        self.taps: dict[int, Tensor] = {}

    def fit(self, tokens: int, requests: int) -> tuple[int, int]:
        """The size that a step of this size is to be padded to."""
        return tokens, requests

    def __call__(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Hidden states: [tokens, hidden], or of `rows` alone, valid until the next call"""
        x, state = self.embed(inputs)
        state.plans = self.plan(inputs)
        return self.model.forward(x, state, rows, self.taps)

    def plan(self, inputs: StepInputs, over: Sequence[Any] | None = None) -> list[Any]:
        """A plan for each KV group. over: plans of another step of this size, to be overwritten."""
        groups = zip(self.backends, inputs.layouts(), over or [None] * len(self.backends), strict=True)
        return [backend.plan(layout, plan) for backend, layout, plan in groups]

    def embed(self, inputs: StepInputs) -> tuple[Tensor, ForwardState]:
        """What the first layer gets; no plans are made yet."""
        ids, positions = inputs.input_ids, inputs.positions
        if self.last_tokens is not None:
            ids = torch.where(ids < 0, self.last_tokens[(-1 - ids).clamp_(min=0)], ids)
        rotary = [table(positions) for table in self.model.rotary]
        return self.model.embed(ids, positions), ForwardState(positions, rotary, [])
