"""A step's arrays on their way to the device, and what of the batch stays there from step to step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import StepLayout
from quire.messages.step import BlockTableEdits
from quire.worker.device import Array, Device
from quire.worker.input_batch import FlatBatch, InputBatch


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
    """Sends each step in one piece. On a device that works late, block tables and the last tokens live there: of the
    first only changes travel, the second never come here first."""

    def __init__(self, device: Device, batch: InputBatch) -> None:
        self.device, self.batch = device, batch
        groups, rows, blocks = batch.block_tables.shape
        self.last_tokens: Tensor | None = None
        if device.is_async:
            at = device.torch_device
            self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=at)  # drawn for each row
            self._tables = torch.zeros(groups, rows, blocks, dtype=torch.int32, device=at)
            self._of_step = torch.zeros(groups * rows * blocks, dtype=torch.int32, device=at)

    def stage(
        self, flat: FlatBatch, edits: BlockTableEdits, more: Mapping[str, Array]
    ) -> tuple[StepInputs, dict[str, Tensor]]:
        """The inputs of the forward, and the arrays `more` on the device. Valid until the next call."""
        arrays: dict[str, Any] = {name: getattr(flat, name) for name in STEP}
        tables = self.batch.block_tables
        if not self.device.is_async:
            width = -(-int(flat.seq_lens.max(initial=1)) // self.batch.block_size)
            arrays |= {"block_tables": tables[:, flat.rows, :width], **more}
            there: dict[str, Any] = self.device.upload(arrays).tensors
            return StepInputs(**{name: there.pop(name) for name in (*STEP, "block_tables")}), there
        arrays["rows"] = flat.rows
        if edits.rows:
            cells = tuple(np.asarray(column, np.int64) for column in (edits.groups, edits.rows, edits.indices))
            arrays |= dict(zip(("edit_groups", "edit_rows", "edit_indices"), cells, strict=True))
            arrays["edit_ids"] = tables[cells]  # equal where a cell is named twice
        upload = self.device.upload({**arrays, **more})
        there = upload.tensors
        if edits.rows:
            where = tuple(there[name] for name in ("edit_groups", "edit_rows", "edit_indices"))
            self._tables.index_put_(where, there["edit_ids"])
        of_step = self.tables_of(len(flat.rows))
        torch.index_select(self._tables, 1, there["rows"], out=of_step)
        packed = None
        if upload.buffer is not None and upload.ends is not None:
            packed = upload.buffer[: upload.ends[STEP[-1]]]
        step = {name: there[name] for name in STEP}
        inputs = StepInputs(**step, block_tables=of_step, packed=packed, longest_prompt=flat.longest_prompt)
        return inputs, {name: there[name] for name in more}

    def tables_of(self, requests: int) -> Tensor:
        """Where the block tables of a step of so many requests lie: [groups, requests, blocks]"""
        groups, _, blocks = self._tables.shape
        return self._of_step[: groups * requests * blocks].view(groups, requests, blocks)
