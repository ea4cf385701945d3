"""Decodes the blocks of GGUF files with all threads (gguf_blocks.cpp)."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel, library
from quire.ops.reference.quantized import QuantizedMatrix


class _Layout(NamedTuple):
    """The layout of a type's blocks. bits: bits of a code. groups: groups with a scale. scales: the type of scales.
    factors: the number of factors."""

    number: int
    elements: int
    bits: int
    groups: int
    scales: torch.dtype
    has_offsets: bool
    factors: int = 0


_LAYOUTS = {
    "Q4_0": _Layout(2, 32, 4, 1, torch.float16, has_offsets=False),
    "Q4_1": _Layout(3, 32, 4, 1, torch.float16, has_offsets=True),
    "Q5_0": _Layout(6, 32, 5, 1, torch.float16, has_offsets=False),
    "Q5_1": _Layout(7, 32, 5, 1, torch.float16, has_offsets=True),
    "Q8_0": _Layout(8, 32, 8, 1, torch.float16, has_offsets=False),
    "Q2_K": _Layout(10, 256, 2, 16, torch.uint8, has_offsets=True, factors=2),
    "Q3_K": _Layout(11, 256, 3, 16, torch.int8, has_offsets=False, factors=1),
    "Q4_K": _Layout(12, 256, 4, 8, torch.uint8, has_offsets=True, factors=2),
    "Q5_K": _Layout(13, 256, 5, 8, torch.uint8, has_offsets=True, factors=2),
    "Q6_K": _Layout(14, 256, 6, 16, torch.int8, has_offsets=False, factors=1),
}


def can_decode(kind: str, data: Tensor) -> bool:
    return kind in _LAYOUTS and data.device.type == "cpu" and library() is not None


def decode_blocks(kind: str, data: Tensor) -> QuantizedMatrix:
    """data: uint8 [out, blocks, bytes of a block]"""
    layout, data, (rows, blocks, _) = _LAYOUTS[kind], data.contiguous(), data.shape
    in_features = blocks * layout.elements
    codes = torch.empty(rows, in_features // 2 if layout.bits <= 4 else in_features, dtype=torch.uint8)
    scales = torch.empty(rows, blocks * layout.groups, dtype=layout.scales)
    offsets = torch.empty_like(scales) if layout.has_offsets else None
    factors = torch.empty(rows, blocks, layout.factors, dtype=torch.float16) if layout.factors else None
    kernel("quire_gguf_blocks", "ipllppppi")(
        layout.number,
        data.data_ptr(),
        rows,
        blocks,
        codes.data_ptr(),
        scales.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        None if factors is None else factors.data_ptr(),
        torch.get_num_threads(),
    )
    group = layout.elements // layout.groups
    return QuantizedMatrix(codes, scales, group, in_features, offsets, factors, code_bits=layout.bits)


def put_values(kind: str, data: Tensor, factor: float, shift: float, out: Tensor) -> None:
    """Write the values of blocks, times `factor` and plus `shift`, to `out`.

    data: uint8 [out, blocks, bytes of a block]. out: [out, in], of one of the types in CODES
    """
    rows, blocks, _ = data.shape
    kernel("quire_gguf_values", "iipllffpi")(
        _LAYOUTS[kind].number,
        CODES[out.dtype],
        data.data_ptr(),
        rows,
        blocks,
        factor,
        shift,
        out.data_ptr(),
        torch.get_num_threads(),
    )
