"""The state of the running requests on the device, and the changes that each step makes to it."""

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
    """Return the state on a CPU: views of the batch's own arrays."""
    return BatchState(**{field.name: torch.from_numpy(getattr(batch, field.name)) for field in fields(BatchState)})


@dataclass(frozen=True)
class DeviceState(BatchState):
    """The state on an asynchronous device. New requests, known tokens, counts of computed tokens and block-table edits
    are sent with the step. Sampled tokens are written by the device and never sent."""

    @classmethod
    def empty(cls, batch: InputBatch, device: torch.device) -> Self:
        return cls(
            **{name: torch.zeros_like(tensor, device=device) for name, tensor in vars(shared_state(batch)).items()}
        )

    @staticmethod
    def changes(batch: InputBatch, step: SchedulerOutput) -> dict[str, Array]:
        """Return the arrays that `apply` needs for a step whose requests and edits have already been applied to
        `batch`.

        Cells are indices into the flattened tensors. A cell that occurs twice gets the same value twice.
        """
        arrays: dict[str, Array] = {}
        if step.new_requests:
            rows = np.array([new.row for new in step.new_requests])
            counts = np.array([len(new.token_ids) for new in step.new_requests])
            columns = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
            token_rows = np.repeat(rows, counts)
            arrays["new_rows"] = rows
            arrays["new_counters"] = np.stack(
                [counts, [new.num_computed_tokens for new in step.new_requests], batch.num_prompt[rows]]
            )
            arrays["new_token_cells"] = token_rows * batch.token_ids.shape[1] + columns
            arrays["new_token_ids"] = batch.token_ids[token_rows, columns]
        known = step.known_tokens
        if known.rows:
            arrays["known_rows"], arrays["known_counts"] = np.asarray(known.rows), batch.num_tokens[known.rows]
            arrays["known_cells"] = arrays["known_rows"] * batch.token_ids.shape[1] + known.positions
            arrays["known_ids"] = batch.token_ids[known.rows, known.positions]
        drafts = step.draft_tokens
        if drafts.rows:
            arrays["draft_cells"] = np.asarray(drafts.rows) * batch.token_ids.shape[1] + drafts.positions
            arrays["draft_ids"] = batch.token_ids[drafts.rows, drafts.positions]
        edits = step.block_table_edits
        if edits.rows:
            cells = edits.groups, edits.rows, edits.indices
            arrays["edit_cells"] = np.ravel_multi_index(cells, batch.block_tables.shape)
            arrays["edit_ids"] = batch.block_tables[cells]
        return arrays

    def apply(self, arrays: Mapping[str, Tensor]) -> None:
        """Apply a step's changes. arrays: the result of `changes`, on the device."""
        if "new_rows" in arrays:
            for counter, values in zip(
                (self.num_tokens, self.num_computed, self.num_prompt), arrays["new_counters"], strict=True
            ):
                counter.index_copy_(0, arrays["new_rows"], values)
            self.token_ids.view(-1).index_copy_(0, arrays["new_token_cells"], arrays["new_token_ids"])
        if "known_rows" in arrays:
            self.num_tokens.index_copy_(0, arrays["known_rows"], arrays["known_counts"])
            self.token_ids.view(-1).index_copy_(0, arrays["known_cells"], arrays["known_ids"])
        if "draft_cells" in arrays:
            self.token_ids.view(-1).index_copy_(0, arrays["draft_cells"], arrays["draft_ids"])
        if "edit_cells" in arrays:
            self.block_tables.view(-1).index_copy_(0, arrays["edit_cells"], arrays["edit_ids"])

    def keep(
        self, rows: Tensor, positions: Tensor, token_ids: Tensor, requests: Mapping[str, Tensor], kept: Tensor
    ) -> None:
        """Append the kept sampled tokens, and subtract rejected drafts from the computed tokens. The arguments are
        those of `Staging.sampled` and its result."""
        self.token_ids.index_put_((rows, positions + 1), token_ids.int())  # those that are not kept are harmless
        self.num_tokens.index_add_(0, requests["draft_rows"], kept)
        self.num_computed.index_add_(0, requests["draft_rows"], kept - requests["num_places"])
