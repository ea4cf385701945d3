"""The state of the running requests on the device, and the changes that keep it up to date."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from quire.layers.step_inputs import Array
from quire.messages.step import SchedulerOutput
from quire.sampling.batch_state import BatchState
from quire.worker.input_batch import InputBatch


def shared_state(batch: InputBatch) -> BatchState:
    """The state on a CPU: views of the batch's own arrays."""
    return BatchState(**{field.name: torch.from_numpy(getattr(batch, field.name)) for field in fields(BatchState)})


@dataclass(frozen=True)
class DeviceState(BatchState):
    """The state on a device that works late. New requests, computed tokens and edits of block tables travel with the
    step; sampled tokens are written here and do not travel at all."""

    @classmethod
    def empty(cls, batch: InputBatch, device: torch.device) -> Self:
        return cls(
            **{name: torch.zeros_like(tensor, device=device) for name, tensor in vars(shared_state(batch)).items()}
        )

    @staticmethod
    def changes(batch: InputBatch, step: SchedulerOutput) -> dict[str, Array]:
        """What `apply` needs to know of a step, whose requests and edits `batch` has taken over already.

        Cells are indices into the flattened tensors. A cell that is named twice gets the same value twice.
        """
        arrays: dict[str, Array] = {}
        if step.new_requests:
            rows = np.array([new.row for new in step.new_requests])
            counts = np.array([len(new.token_ids) for new in step.new_requests])
            columns = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
            of_token = np.repeat(rows, counts)
            arrays["new_rows"] = rows
            arrays["new_counters"] = np.stack([counts, [new.num_computed_tokens for new in step.new_requests],
                                               batch.num_prompt[rows]])  # fmt: skip
            arrays["new_token_cells"] = of_token * batch.token_ids.shape[1] + columns
            arrays["new_token_ids"] = batch.token_ids[of_token, columns]
        edits = step.block_table_edits
        if edits.rows:
            where = edits.groups, edits.rows, edits.indices
            arrays["edit_cells"] = np.ravel_multi_index(where, batch.block_tables.shape)
            arrays["edit_ids"] = batch.block_tables[where]
        return arrays

    def apply(self, arrays: Mapping[str, Tensor]) -> None:
        """arrays: what `changes` gave, on the device."""
        if "new_rows" in arrays:
            for counter, values in zip(
                (self.num_tokens, self.num_computed, self.num_prompt), arrays["new_counters"], strict=True
            ):
                counter.index_copy_(0, arrays["new_rows"], values)
            self.token_ids.view(-1).index_copy_(0, arrays["new_token_cells"], arrays["new_token_ids"])
        if "edit_cells" in arrays:
            self.block_tables.view(-1).index_copy_(0, arrays["edit_cells"], arrays["edit_ids"])

    def append(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """At places of `rows`, behind their tokens at `positions`, these tokens were sampled: all [places], int64. A
        row's places are in the order of its text."""
        self.token_ids[rows, positions + 1] = token_ids.int()
        self.num_tokens.scatter_reduce_(0, rows, positions + 2, "amax")
