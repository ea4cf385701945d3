"""Matrix products that torch does not have: of experts' tokens, and with weights that stay quantized in memory."""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.elementwise import grouped_linear
from quire.ops.reference.quantized import QuantizedMatrix, quantized_linear
from quire.ops.triton import on_gpu, precision


@triton.jit
def multiplied(a, b, sums, PRECISION: tl.constexpr):
    """sums + a b"""
    if PRECISION == "interpreted":  # Triton's interpreter cannot multiply bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def part_of(bounds, tile, parts, SIZE: tl.constexpr):
    """Which of `parts` runs of rows a tile of SIZE rows belongs to; each run has one tile more than whole ones."""
    low, high = 0, parts
    while low < high:
        middle = (low + high) // 2
        if tl.load(bounds + middle) // SIZE + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _grouped(
    out, x, weight, bias, offsets, experts, outs, ins, x_stride, expert_stride, row_stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program for a tile of one expert's rows, and OUTS outputs."""
    tile = tl.program_id(0)
    expert = part_of(offsets, tile, experts, ROWS)
    start = tl.load(offsets + expert)
    stop = tl.load(offsets + expert + 1)
    first = start + (tile - start // ROWS - expert) * ROWS
    if first >= stop:
        return
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    inner = tl.arange(0, INS)
    sums = tl.zeros([ROWS, OUTS], tl.float32)
    matrix = weight + expert.to(tl.int64) * expert_stride
    for begin in range(0, ins, INS):
        at = begin + inner
        a = tl.load(
            x + rows[:, None] * x_stride + at[None, :], mask=(rows < stop)[:, None] & (at < ins)[None, :], other=0.0
        )
        b = tl.load(
            matrix + columns[None, :].to(tl.int64) * row_stride + at[:, None],
            mask=(columns < outs)[None, :] & (at < ins)[:, None], other=0.0,
        )  # fmt: skip
        sums = multiplied(a, b, sums, PRECISION)
    if BIAS:
        sums += tl.load(bias + expert * outs + columns, mask=columns < outs, other=0.0).to(tl.float32)[None, :]
    mask = (rows < stop)[:, None] & (columns < outs)[None, :]
    tl.store(out + rows[:, None] * outs + columns[None, :], sums.to(out.dtype.element_ty), mask=mask)


@grouped_linear.implementation("triton", supports=on_gpu)
def grouped_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    rows, experts = len(x), len(weight)
    outs, ins = weight.shape[1:]
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(2) == 1 else weight.contiguous()
    out = x.new_empty(rows, outs)
    if rows:
        size = 64 if rows >= 64 * experts else 16
        wide = min(128, max(16, triton.next_power_of_2(outs)))
        _grouped[(rows // size + experts, triton.cdiv(outs, wide))](
            out, x, weight, x if bias is None else bias.contiguous(), offsets, experts, outs, ins, x.stride(0),
            weight.stride(0), weight.stride(1), bias is not None, size, wide, 64, precision(x.dtype),
        )  # fmt: skip
    return out


@triton.jit
def _weights(codes, scales, offsets, shift, dtype: tl.constexpr, OFFSETS: tl.constexpr, FLOAT8: tl.constexpr):
    if FLOAT8:
        wide = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.float32) - shift
    wide = wide * scales
    if OFFSETS:
        wide += offsets
    return wide.to(dtype)


@triton.jit
def _quantized(
    out, x, codes, scales, offsets, bias, rows, outs, ins, x_stride, code_stride, groups, group,
    BITS: tl.constexpr, SHIFT: tl.constexpr, FLOAT8: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program for ROWS x OUTS results. A weight is dequantized where it is used, to the type of x."""
    at_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    is_row, is_column = at_rows < rows, columns < outs
    x_rows = x + at_rows[:, None].to(tl.int64) * x_stride
    code_rows = codes + columns[None, :].to(tl.int64) * code_stride
    scale_rows = columns[None, :].to(tl.int64) * groups
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros([ROWS, OUTS], tl.float32)
    per_byte: tl.constexpr = 8 // BITS
    for begin in range(0, ins, INS * per_byte):
        place = begin // per_byte + tl.arange(0, INS)  # of a byte
        inside = place * per_byte < ins
        stored = tl.load(code_rows + place[:, None], mask=inside[:, None] & is_column[None, :], other=0)
        for half in tl.static_range(per_byte):
            at = place * per_byte + half
            mask = (at < ins)[:, None] & is_column[None, :]
            scale = tl.load(scales + scale_rows + (at // group)[:, None], mask=mask, other=0.0)
            offset = scale
            if OFFSETS:
                offset = tl.load(offsets + scale_rows + (at // group)[:, None], mask=mask, other=0.0)
            part = stored
            if BITS == 4:
                part = (stored >> (4 * half)) & 15
            w = _weights(part, scale, offset, SHIFT, dtype, OFFSETS, FLOAT8)
            a = tl.load(x_rows + at[None, :], mask=is_row[:, None] & (at < ins)[None, :], other=0.0)
            sums = multiplied(a, w, sums, PRECISION)
    if BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at_out = out + at_rows[:, None].to(tl.int64) * outs + columns[None, :]
    tl.store(at_out, sums.to(dtype), mask=is_row[:, None] & is_column[None, :])


@quantized_linear.implementation("triton", supports=on_gpu)
def quantized_linear_triton(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    x = x if weight.order is None else x[:, weight.order]
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, outs = len(x), weight.out_features
    out = x.new_empty(rows, outs)
    if not out.numel():
        return out
    scales, offsets = weight.effective_scales().contiguous(), weight.effective_offsets()
    offsets = scales if offsets is None else offsets.contiguous()
    is_float8 = weight.codes.is_floating_point()
    centre = 0.0 if is_float8 or weight.offsets is not None else float(1 << (weight.bits - 1))
    size = 16 if rows <= 16 else 64
    _quantized[(triton.cdiv(rows, size), triton.cdiv(outs, 64))](
        out, x, weight.codes.view(torch.uint8), scales, offsets, x if bias is None else bias, rows, outs,
        weight.in_features, x.stride(0), weight.codes.stride(0), scales.shape[1], weight.group, weight.bits, centre,
        is_float8, weight.offsets is not None, bias is not None, size, 64, 64, precision(x.dtype),
    )  # fmt: skip
    return out


def _pack(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Without factors, so that nothing is left to be computed of the scales."""
    return replace(matrix, scales=matrix.effective_scales(), offsets=matrix.effective_offsets(), factors=None)


quantized_linear_triton.pack = _pack  # type: ignore[attr-defined]
