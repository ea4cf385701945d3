"""Quantized weights in the layout of the kernels' products (linear.py)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.ops.reference.quantized import QuantizedMatrix


@dataclass(frozen=True)
class PackedMatrix(QuantizedMatrix):
    """A matrix as the kernels read it fastest. Integers of 8 bits without offsets have the centre 0; scales and offsets
    of all outputs for one group are neighbours in memory.

    run: a word of 16 bits has four codes of 4 bits, and `run` words hold 4 * run inputs: the lowest bits of all words
        come first, so that x is read in runs. Rows are padded to whole runs. If a run is a group, each quarter of a
        word has a group of its own.
    entries: [32], int32; the table in the forms that kernels look up: float32, and the low and the high bytes of its
        values in bfloat16 and in float16.
    """

    run: int = 1
    entries: Tensor | None = None

    def single_codes(self) -> Tensor:
        if self.bits == 8:
            return self.codes
        single = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).view(len(self.codes), -1, self.run, 4)
        return single.transpose(2, 3).flatten(1)[:, : self.in_features]


def _entries_of(table: Tensor) -> Tensor:
    """See PackedMatrix."""
    halves = (table.to(dtype).view(torch.uint8).view(16, 2).t() for dtype in (torch.bfloat16, torch.float16))
    return torch.cat([table.view(torch.int32), *(half.flatten().view(torch.int32) for half in halves)])


def pack(matrix: QuantizedMatrix) -> PackedMatrix:
    if isinstance(matrix, PackedMatrix):  # of several matrices that were packed before they were concatenated
        offsets = None if matrix.offsets is None else _by_group(matrix.offsets)
        return replace(matrix, scales=_by_group(matrix.scales), offsets=offsets)
    codes, ins, run = matrix.codes, matrix.in_features, 1
    if codes.dtype is torch.uint8 and matrix.bits == 8 and matrix.offsets is None:
        codes = (codes ^ 128).view(torch.int8)
    if matrix.bits == 4:
        run = _run_of(matrix)
        single = torch.nn.functional.pad(matrix.single_codes(), (0, -ins % (4 * run)))
        first, second, third, fourth = single.view(len(codes), -1, 4, run).unbind(2)  # from a word's lowest bits
        codes = torch.stack([first | second << 4, third | fourth << 4], dim=-1).flatten(1)
    scales, offsets = matrix.scales, matrix.offsets
    if matrix.factors is not None:
        scales, offsets = matrix.effective_scales(), matrix.effective_offsets()
    return PackedMatrix(
        codes.contiguous(), _by_group(scales), matrix.group, ins, None if offsets is None else _by_group(offsets),
        order=matrix.order, num_inputs=matrix.num_inputs, table=matrix.table, run=run,
        entries=None if matrix.table is None else _entries_of(matrix.table),
    )  # fmt: skip


def _run_of(matrix: QuantizedMatrix) -> int:
    """The run of a PackedMatrix with 4 bits."""
    group, ins = matrix.group, matrix.in_features
    if group % 16 == 0 and group % 128 and 4 * group <= ins and matrix.offsets is None:
        return group
    return next((run for run in (8, 4) if group % (4 * run) == 0 and ins % (4 * run) == 0), 1)


def _by_group(values: Tensor) -> Tensor:
    return values.t().contiguous().t()
