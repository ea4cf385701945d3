"""The drafters' view of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from quire.layers.step_inputs import Array, StepInputs
from quire.messages.step import SchedulerOutput
from quire.worker.input_batch import FlatBatch, Spans


@dataclass
class SampledStep:
    """A step whose sampled tokens have been added to the state of the requests.

    inputs: of the target model's forward. hidden: its final hidden states, [tokens, hidden], if the drafter reads them.
    rows: [requests]; token_rows: [tokens]; kept: [requests], how many of its sampled tokens each request keeps, None if
    all; limits: [requests], how many tokens of each request have slots in the cache.
    """

    flat: FlatBatch
    inputs: StepInputs
    hidden: Tensor | None
    rows: Tensor
    token_rows: Tensor
    num_places: Tensor
    limits: Tensor
    kept: Tensor | None = None

    @staticmethod
    def arrays(flat: FlatBatch, step: SchedulerOutput, max_model_len: int) -> dict[str, Array]:
        """Return the arrays that `of` needs on the device."""
        limits = flat.seq_lens.astype("int64")
        if step.num_next_drafts:
            limits = limits + step.num_next_drafts
        return {
            "draft_rows": flat.rows,
            "token_rows": flat.token_rows,
            "num_places": flat.num_places,
            "draft_limits": limits.clip(max=max_model_len),
        }

    @classmethod
    def of(cls, flat: FlatBatch, inputs: StepInputs, hidden: Tensor | None, on_device: Mapping[str, Tensor]) -> Self:
        """Create the step. on_device: the result of `arrays`, on the device."""
        names = "draft_rows", "token_rows", "num_places", "draft_limits"
        return cls(flat, inputs, hidden, *(on_device[name] for name in names))

    @classmethod
    def dummy(cls, inputs: StepInputs, hidden: Tensor, requests: int) -> Self:
        """Return a dummy step of this many requests, to measure time or memory. Its drafts are not stored."""
        tokens = inputs.size.tokens
        lengths = np.asarray(inputs.size.tokens_per_request or 1).repeat(requests)
        spans = Spans.of(np.arange(requests), 0 * lengths, lengths)
        ones = np.ones(requests, np.int64)
        flat = FlatBatch(
            spans.rows,
            spans.token_rows,
            spans.positions,
            spans.query_start_loc,
            spans.seq_lens.astype(np.int32),
            ones,
            np.arange(requests + 1),
            spans.rows,
            spans.rows,
            ones,
        )
        rows = torch.arange(requests, device=hidden.device)
        return cls(
            flat, inputs, hidden, rows, rows.new_zeros(tokens), rows.new_ones(requests), rows.new_zeros(requests)
        )

    def last_kept(self) -> Tensor:
        """Return [requests]: the flat-batch index of each request's last computed token that is part of its text."""
        ends = self.inputs.query_start_loc[1 : len(self.rows) + 1].long() - 1
        return ends if self.kept is None else torch.where(self.num_places > 0, ends - self.num_places + self.kept, ends)
