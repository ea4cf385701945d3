"""Matrix products that torch lacks: grouped by expert, and with weights that stay quantized in memory.

For weights of 8 bits, the inputs are rounded to 8 bits as well, with a scale for each token. Other weights are
dequantized where they are used, and so are all weights of float32 models.
"""

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.elementwise import grouped_linear
from quire.ops.reference.quantized import QuantizedMatrix, grouped_quantized_linear, quantized_linear
from quire.ops.registry import Function, Op
from quire.ops.triton import on_gpu, on_gpu_in_any_batch, precision


@triton.jit
def multiplied(a, b, sums, PRECISION: tl.constexpr):
    """sums + a b"""
    if PRECISION == "interpreted":  # Triton's interpreter cannot multiply bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def part_of(bounds, tile, parts, SIZE: tl.constexpr):
    """The index of the part of the rows, of `parts` in all, that a tile of SIZE rows belongs to.

    Part i has the rows bounds[i] : bounds[i + 1], and tile bounds[i] // SIZE + i is its first.
    """
    low, high = 0, parts
    while low < high:
        middle = (low + high) // 2
        if tl.load(bounds + middle) // SIZE + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _rows_of(bounds, rows, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert of the program's tile, first row of the tile, end of the expert's rows); without experts, of all rows."""
    tile = tl.program_id(0)
    expert, first, stop = tile * 0, tile * ROWS, rows
    if EXPERTS:
        expert = part_of(bounds, tile, experts, ROWS)
        start = tl.load(bounds + expert).to(tl.int32)
        stop = tl.load(bounds + expert + 1).to(tl.int32)
        first = start + (tile - start // ROWS - expert) * ROWS
    return expert, first, stop


@triton.jit
def _grouped(
    out, x, weight, bias, offsets, experts, outs, ins, x_stride, expert_stride, row_stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program computes OUTS outputs for a tile of one expert's rows."""
    expert, first, stop = _rows_of(offsets, 0, experts, True, ROWS)
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


@grouped_linear.implementation("triton", supports=on_gpu, invariant_on=())
def grouped_linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, fixed: bool = False
) -> Tensor:
    """fixed: the tile does not depend on the number of rows, so that results do not depend on the batch."""
    rows, experts = len(x), len(weight)
    outs, ins = weight.shape[1:]
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(2) == 1 else weight.contiguous()
    out = x.new_empty(rows, outs)
    if rows:
        size = 64 if fixed or rows >= 64 * experts else 16
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


@triton.jit(do_not_specialize=["rows"])
def _quantized(
    out, x, codes, scales, offsets, bias, bounds, rows, experts, outs, ins, x_stride, code_stride, groups, group,
    BITS: tl.constexpr, SHIFT: tl.constexpr, FLOAT8: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program computes ROWS x OUTS results (of one expert, if there are experts). Weights are dequantized to the type
    of x where they are used."""
    expert, first, stop = _rows_of(bounds, rows, experts, EXPERTS, ROWS)
    if first >= stop:
        return
    at_rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    is_row, is_column = at_rows < stop, columns < outs
    x_rows = x + at_rows[:, None].to(tl.int64) * x_stride
    weight_rows = (expert * outs + columns)[None, :].to(tl.int64)
    code_rows = codes + weight_rows * code_stride
    scale_rows = weight_rows * groups
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros([ROWS, OUTS], tl.float32)
    per_byte: tl.constexpr = 8 // BITS
    for begin in range(0, ins, INS * per_byte):
        place = begin // per_byte + tl.arange(0, INS)  # indices of bytes
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
        sums += tl.load(bias + expert * outs + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at_out = out + at_rows[:, None].to(tl.int64) * outs + columns[None, :]
    tl.store(at_out, sums.to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _rounded(x, codes, scales, ins, stride, FLOAT8: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each row. It writes the row as codes of 8 bits, and their scale."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, ins, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + row * stride + at, mask=at < ins, other=0.0).to(tl.float32)))
    top: tl.constexpr = 448.0 if FLOAT8 else 127.0
    scale = tl.maximum(tl.max(largest) / top, 1e-30)
    tl.store(scales + row, scale)
    for begin in range(0, ins, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        scaled = tl.load(x + row * stride + at, mask=at < ins, other=0.0).to(tl.float32) / scale
        if FLOAT8:
            code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            shift: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer
            code = ((scaled + shift) - shift).to(tl.int8).to(tl.uint8, bitcast=True)
        tl.store(codes + row * ins + at, code, mask=at < ins)


@triton.jit(do_not_specialize=["rows"])
def _eight_bits(
    out, x, x_scales, codes, scales, bias, bounds, rows, experts, outs, ins, code_stride, groups, group,
    FLOAT8: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    INS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Like _quantized, but x has 8 bits as well. Products of codes are scaled once for each part of a group."""
    expert, first, stop = _rows_of(bounds, rows, experts, EXPERTS, ROWS)
    if first >= stop:
        return
    at_rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    is_row, is_column = at_rows < stop, columns < outs
    weight_rows = (expert * outs + columns).to(tl.int64)
    sums = tl.zeros([ROWS, OUTS], tl.float32)
    for begin in range(0, ins, INS):
        at = begin + tl.arange(0, INS)
        inside = at < ins
        a = tl.load(
            x + at_rows[:, None].to(tl.int64) * ins + at[None, :], mask=is_row[:, None] & inside[None, :], other=0
        )
        zero: tl.constexpr = 0 if FLOAT8 else 128
        b = tl.load(
            codes + weight_rows[None, :] * code_stride + at[:, None], mask=inside[:, None] & is_column[None, :],
            other=zero,
        )  # fmt: skip
        if FLOAT8:
            a, b = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
        else:
            a, b = a.to(tl.int8, bitcast=True), (b ^ 128).to(tl.int8, bitcast=True)
        if PRECISION == "interpreted":
            part = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            part = tl.dot(a, b).to(tl.float32)
        sums += part * tl.load(scales + weight_rows * groups + begin // group, mask=is_column, other=0.0)[None, :]
    sums *= tl.load(x_scales + at_rows, mask=is_row, other=0.0)[:, None]
    if BIAS:
        sums += tl.load(bias + expert * outs + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at_out = out + at_rows[:, None].to(tl.int64) * outs + columns[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@quantized_linear.implementation("triton", supports=on_gpu, invariant_on=())
def quantized_linear_triton(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, fixed: bool = False) -> Tensor:
    """fixed: see grouped_linear_triton."""
    return _product(x, weight, bias, None, fixed)


@grouped_quantized_linear.implementation("triton", supports=on_gpu, invariant_on=())
def grouped_quantized_linear_triton(
    x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, offsets: Tensor, fixed: bool = False
) -> Tensor:
    """fixed: see grouped_linear_triton."""
    return _product(x, weight, bias, offsets, fixed)


def _product(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, bounds: Tensor | None, fixed: bool) -> Tensor:
    """bounds: offsets of the experts' rows, None if one weight serves all rows."""
    x = x if weight.order is None else x[:, weight.order]
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, experts = len(x), 1 if bounds is None else len(bounds) - 1
    outs = weight.out_features // experts
    out = x.new_empty(rows, outs)
    if not out.numel():
        return out
    scales, offsets = weight.effective_scales().contiguous(), weight.effective_offsets()
    offsets = scales if offsets is None else offsets.contiguous()
    is_float8 = weight.codes.is_floating_point()
    part = _part(weight)
    if part and x.dtype is not torch.float32:
        x_codes = torch.empty(rows, weight.in_features, dtype=torch.uint8, device=x.device)
        x_scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        _rounded[(rows,)](x, x_codes, x_scales, weight.in_features, x.stride(0), is_float8, 1024)
        size = 64
        if rows <= 16 * experts and not fixed:
            size = 16
        elif rows >= 128 * experts and not fixed:
            size = 128
        tiles = triton.cdiv(rows, size) if bounds is None else rows // size + experts
        _eight_bits[(tiles, triton.cdiv(outs, 64))](
            out, x_codes, x_scales, weight.codes.view(torch.uint8), scales, x if bias is None else bias.contiguous(),
            x if bounds is None else bounds, rows, experts, outs, weight.in_features, weight.codes.stride(0),
            scales.shape[1], weight.group, is_float8, bias is not None, bounds is not None, size, 64, part,
            precision(x.dtype),
        )  # fmt: skip
        return out
    centre = 0.0 if is_float8 or weight.offsets is not None else float(1 << (weight.bits - 1))
    size = 16 if rows <= 16 * experts and not fixed else 64
    tiles = triton.cdiv(rows, size) if bounds is None else rows // size + experts
    _quantized[(tiles, triton.cdiv(outs, 64))](
        out, x, weight.codes.view(torch.uint8), scales, offsets, x if bias is None else bias.contiguous(),
        x if bounds is None else bounds, rows, experts, outs, weight.in_features, x.stride(0), weight.codes.stride(0),
        scales.shape[1], weight.group, weight.bits, centre, is_float8, weight.offsets is not None, bias is not None,
        bounds is not None, size, 64, 64, precision(x.dtype),
    )  # fmt: skip
    return out


def _part(weight: QuantizedMatrix) -> int:
    """How many inputs a product of 8 bits takes at a time; they share one scale. 0 if weights must be dequantized."""
    if weight.bits != 8 or weight.offsets is not None:
        return 0
    if weight.group >= weight.in_features:
        return 128
    return next((n for n in (128, 64, 32) if weight.group % n == 0), 0)


def _pack(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Multiply the scales and offsets by their factors, so that products need not."""
    return replace(matrix, scales=matrix.effective_scales(), offsets=matrix.effective_offsets(), factors=None)


def _register_fixed(op: Op, function: Function) -> Function:
    """Register `function` with a fixed tile beside itself, for results that must not depend on the batch."""
    return op.implementation("triton-fixed", supports=on_gpu_in_any_batch)(partial(function, fixed=True))


_register_fixed(grouped_linear, grouped_linear_triton)
_register_fixed(grouped_quantized_linear, grouped_quantized_linear_triton)
for _function in (quantized_linear_triton, _register_fixed(quantized_linear, quantized_linear_triton)):
    _function.pack = _pack  # type: ignore[attr-defined]
