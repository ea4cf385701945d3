"""A step's arrays on their way to the device, and what of the batch stays there from step to step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import StepLayout
from quire.messages.step import SchedulerOutput
from quire.worker.device import Array, Device
from quire.worker.input_batch import FlatBatch, InputBatch
from quire.worker.state import DeviceState, shared_state


@dataclass
class StepInputs:
    """What a forward is made from. packed: the bytes of all but the block tables, where they travelled together."""

    input_ids: Tensor  # [tokens], int64
    positions: Tensor  # [tokens], int64
    slot_mapping: Tensor  # [groups, tokens], int64
    query_start_loc: Tensor  # [requests + 1], int32
    seq_lens: Tensor  # [requests], int32
    block_tables: Tensor  # [groups, requests, blocks], int32
    packed: Tensor | None = None
    longest_prompt: int = 0  # see StepLayout; not known on a CPU

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    def layouts(self) -> list[StepLayout]:
        """One a KV group."""
        return [
            StepLayout(self.query_start_loc, self.seq_lens, slots, table, self.longest_prompt)
            for slots, table in zip(self.slot_mapping, self.block_tables, strict=True)
        ]


STEP = ("input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens")  # in this order


class Staging:
    """Sends each step in one piece. On a device that works late, the requests' state lives there: only changes of it
    travel, and sampled tokens never come here first."""

    def __init__(self, device: Device, batch: InputBatch) -> None:
        self.device, self.batch = device, batch
        self.state = shared_state(batch)
        self.last_tokens: Tensor | None = None
        if device.is_async:
            groups, rows, blocks = batch.block_tables.shape
            at = device.torch_device
            self.state = DeviceState.empty(batch, at)
            self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=at)  # drawn for each row
            self._of_step = torch.zeros(groups * rows * blocks, dtype=torch.int32, device=at)

    def stage(
        self, flat: FlatBatch, step: SchedulerOutput, more: Mapping[str, Array]
    ) -> tuple[StepInputs, dict[str, Tensor]]:
        """The inputs of the forward, and the arrays `more` on the device. Valid until the next call.

        flat: made of `step`, whose requests and edits the batch has taken over; or of a dummy step, with an empty one.
        """
        arrays: dict[str, Any] = {name: getattr(flat, name) for name in STEP}
        state = self.state
        if not isinstance(state, DeviceState):
            width = -(-int(flat.seq_lens.max(initial=1)) // self.batch.block_size)
            arrays |= {"block_tables": self.batch.block_tables[:, flat.rows, :width], **more}
            there: dict[str, Any] = self.device.upload(arrays).tensors
            return StepInputs(**{name: there.pop(name) for name in (*STEP, "block_tables")}), there
        arrays |= {"rows": flat.rows, **state.changes(self.batch, step), **more}
        upload = self.device.upload(arrays)
        there = upload.tensors
        state.apply(there)
        if step.rows:
            state.advance(there["rows"], there["query_start_loc"])
        of_step = self.tables_of(len(flat.rows))
        torch.index_select(state.block_tables, 1, there["rows"], out=of_step)
        packed = None
        if upload.buffer is not None and upload.ends is not None:
            packed = upload.buffer[: upload.ends[STEP[-1]]]
        inputs = StepInputs(
            **{name: there[name] for name in STEP}, block_tables=of_step, packed=packed,
            longest_prompt=flat.longest_prompt,
        )  # fmt: skip
        return inputs, {name: there[name] for name in more}

    def sampled(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """At the places of a step, see FlatBatch, these tokens were sampled: [places], int64. On a CPU, the batch has
        been told, and that is enough."""
        if isinstance(self.state, DeviceState) and self.last_tokens is not None:
            self.last_tokens[rows] = token_ids
            self.state.append(rows, positions, token_ids)

    def tables_of(self, requests: int) -> Tensor:
        """Where the block tables of a step of so many requests lie: [groups, requests, blocks]"""
        groups, _, blocks = self.batch.block_tables.shape
        return self._of_step[: groups * requests * blocks].view(groups, requests, blocks)
