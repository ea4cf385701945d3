"""Quantized weights in the layout of the kernels' products (linear.py)."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from quire.ops.reference.quantized import QuantizedMatrix


@dataclass(frozen=True)
class PackedMatrix(QuantizedMatrix):
    """A matrix in the layout that the kernels read fastest. Integers of 8 bits without offsets have the centre 0. In
    memory, the scales and offsets of all outputs for a group are contiguous. Factors, if any, have one element for each
    output.

    run: a word of 16 bits has four codes of 4 bits, and `run` words contain 4 * run inputs: the lowest bits of all
    words come first, so that x is read in runs. Rows are padded to whole runs. If a run is a group, each quarter of a
    word belongs to a different group.
    """

    run: int = 1

    def single_codes(self) -> Tensor:
        if self.bits == 8:
            return self.codes
        single = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).view(len(self.codes), -1, self.run, 4)
        return single.transpose(2, 3).flatten(1)[:, : self.in_features]


def pack(matrix: QuantizedMatrix) -> PackedMatrix:
    if isinstance(matrix, PackedMatrix):  # a concatenation of matrices that were already packed
        offsets = None if matrix.offsets is None else _by_group(matrix.offsets)
        return replace(matrix, scales=_by_group(matrix.scales), offsets=offsets)
    codes = matrix.codes
    ins = matrix.in_features
    run = 1
    if codes.dtype is torch.uint8 and matrix.bits == 8 and matrix.offsets is None:
        codes = (codes ^ 128).view(torch.int8)
    if matrix.bits == 4:
        run = _run_of(matrix)
        single = torch.nn.functional.pad(matrix.single_codes(), (0, -ins % (4 * run)))
        first, second, third, fourth = single.view(len(codes), -1, 4, run).unbind(2)  # from a word's lowest bits
        codes = torch.stack([first | second << 4, third | fourth << 4], dim=-1).flatten(1)
    scales = matrix.scales
    offsets = matrix.offsets
    factors = matrix.factors
    if factors is not None and factors.shape[1:].numel() != 1:
        scales = matrix.effective_scales()
        offsets = matrix.effective_offsets()
        factors = None
    return PackedMatrix(
        codes.contiguous(),
        _by_group(scales),
        matrix.group,
        ins,
        None if offsets is None else _by_group(offsets),
        factors,
        matrix.order,
        matrix.num_inputs,
        matrix.table,
        run=run,
    )


@cache
def words_of(table: tuple[float, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the low bytes of the table's values in a type of 16 bits, as four words, then the high bytes."""
    pairs = torch.tensor(table, dtype=dtype).view(torch.uint8).view(16, 2)
    return tuple(pairs.t().contiguous().view(torch.int32).flatten().tolist())


def _run_of(matrix: QuantizedMatrix) -> int:
    """Return the run of a PackedMatrix with 4 bits."""
    group = matrix.group
    ins = matrix.in_features
    if group % 16 == 0 and group % 128 and 4 * group <= ins and matrix.offsets is None:
        return group
    return next((run for run in (8, 4) if group % (4 * run) == 0 and ins % (4 * run) == 0), 1)


def _by_group(values: Tensor) -> Tensor:
    return values.t().contiguous().t()
