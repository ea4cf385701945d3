"""From a step's inputs to hidden states."""

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.layers.forward_state import ForwardState
from quire.models.model import Model
from quire.worker.staging import StepInputs


class Forward:
    """Calls every kernel anew. last_tokens: see Staging.

    taps: where to write hidden states of chosen layers, see Model.forward. To be set before the first step.
    """

    def __init__(self, model: Model, backend: AttentionBackend, last_tokens: Tensor | None = None) -> None:
        self.model, self.backend, self.last_tokens = model, backend, last_tokens
        self.taps: dict[int, Tensor] = {}

    def fit(self, tokens: int, requests: int) -> tuple[int, int]:
        """The size that a step of this size is to be padded to."""
        return tokens, requests

    def __call__(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Hidden states: [tokens, hidden], or of `rows` alone, valid until the next call"""
        x, state = self.embed(inputs)
        state.plans = [self.backend.plan(layout) for layout in inputs.layouts()]
        return self.model.forward(x, state, rows, self.taps)

    def embed(self, inputs: StepInputs) -> tuple[Tensor, ForwardState]:
        """What the first layer gets; no plans are made yet."""
        ids, positions = inputs.input_ids, inputs.positions
        if self.last_tokens is not None:
            ids = torch.where(ids < 0, self.last_tokens[(-1 - ids).clamp_(min=0)], ids)
        rotary = [table(positions) for table in self.model.rotary]
        return self.model.embed(ids, positions), ForwardState(positions, rotary, [])
