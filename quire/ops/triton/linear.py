"""Matrix products that torch lacks: grouped by expert, and with weights that stay quantized in memory. Dense products
of few rows are computed here as well.

For weights of 8 bits, the inputs are rounded to 8 bits as well, with a scale for each token. Other weights are
dequantized where they are used, and so are all weights of float32 models.

A product is computed transposed: weights are the left operand. Tensor cores take more rows of the left operand than
columns of the right one, and decoding has many outputs and few tokens.
"""

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.elementwise import grouped_linear, linear
from quire.ops.reference.quantized import (
    QuantizedMatrix,
    concatenate,
    grouped_quantized_linear,
    quantized_linear,
    tensor_of,
)
from quire.ops.registry import Function, Op, Target
from quire.ops.triton.float8 import converts_float8, to_float8
from quire.ops.triton.packed import PackedMatrix, pack, words_of
from quire.ops.triton.targets import INTERPRETED, on_gpu, on_gpu_in_any_batch, precision
from quire.ops.triton.tiles import suits_few_rows, tile_of
from quire.ops.triton.weights import group_of_quarter, weights_of
from quire.platform.gpu.cards import card_of

_FIXED_ROWS = 64  # rows of an expert for which tiles and splits are chosen if these must not depend on the batch


@triton.jit
def multiplied(a, b, sums, PRECISION: tl.constexpr):
    """sums + a b"""
    if PRECISION == "interpreted":  # Triton's interpreter cannot multiply bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(a, b, sums, input_precision=PRECISION, out_dtype=sums.dtype)


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
def _rows_of(bounds, tile, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile, if each expert has just as many tiles as it needs.

    EXPERTS: a power of two, at least `experts`. Behind the last tile, the expert is `experts` or more.
    """
    each = tl.arange(0, EXPERTS)
    is_expert = each < experts
    starts = tl.load(bounds + each, mask=is_expert, other=0).to(tl.int32)
    stops = tl.load(bounds + each + 1, mask=is_expert, other=0).to(tl.int32)
    tiles = (stops - starts + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(each < expert, tiles, 0), 0)
    start = tl.sum(tl.where(each == expert, starts, 0), 0)
    stop = tl.sum(tl.where(each == expert, stops, 0), 0)
    return expert, start + (tile - before) * ROWS, stop


@triton.jit
def _scales_of_quarters(scale_rows, word, ins, group_stride, GROUP: tl.constexpr):
    return (
        tl.load(scale_rows + group_of_quarter(word, 0, ins, GROUP) * group_stride),
        tl.load(scale_rows + group_of_quarter(word, 1, ins, GROUP) * group_stride),
        tl.load(scale_rows + group_of_quarter(word, 2, ins, GROUP) * group_stride),
        tl.load(scale_rows + group_of_quarter(word, 3, ins, GROUP) * group_stride),
    )


@triton.jit(do_not_specialize=["rows", "tiles"])
def _product(
    out,
    x,
    x_scales,
    codes,
    table,
    scales,
    offsets,
    factors,
    bias,
    bounds,
    rows,
    tiles,
    experts,
    outs,
    ins,
    length,
    span,
    x_stride,
    code_stride,
    scale_stride,
    group_stride,
    FORM: tl.constexpr,
    WORDS: tl.constexpr,
    EIGHT: tl.constexpr,
    SCALING: tl.constexpr,
    OFFSETS: tl.constexpr,
    FACTORS: tl.constexpr,
    CENTRE: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program computes ROWS x OUTS results (of one expert, if there are experts) from `span` words of each row of
    weights, which has `length`: elements, or four codes of 4 bits. It writes them to the part of `out` for these
    inputs.

    FORM: of the weights, "dense", "integer", "float8", "four", or "table": four bits that stand for the values in
    `table`, or in WORDS (see words_of) if PTX. EIGHT: x has codes of 8 bits as well, with a scale for each row.
    SCALING: "none"; "row" if an output has one scale; "step" if the weights of an output in one step of the loop share
    a scale; "quarters" if those in the same quarter of their words do; "groups" if a step has several whole groups of
    GROUP inputs; "any" for other groups. EVEN: inputs need no masks. PTX: instructions of NVIDIA's cards may be used.
    """
    neighbours: tl.constexpr = 8  # so many tiles of rows read the same weights one after another, from the L2 cache
    blocks = tl.cdiv(outs, OUTS)
    first_tile = tl.program_id(0) // (neighbours * blocks) * neighbours
    index = tl.program_id(0) - first_tile * blocks
    count = tl.minimum(tiles - first_tile, neighbours)
    tile, block, split = first_tile + index % count, index // count, tl.program_id(1)
    expert, first, stop = tile * 0, tile * ROWS, rows
    if EXPERTS:
        expert, first, stop = _rows_of(bounds, tile, experts, EXPERTS, ROWS)
        if expert >= experts:
            return
    at_rows = first + tl.arange(0, ROWS)
    columns = block * OUTS + tl.arange(0, OUTS)
    is_row, is_column = at_rows < stop, columns < outs
    weight_rows = (expert * outs + tl.minimum(columns, outs - 1)).to(tl.int64)
    code_rows = codes + weight_rows[:, None] * code_stride
    scale_rows, offset_rows = scales + weight_rows * scale_stride, offsets + weight_rows * scale_stride
    x_rows = x + at_rows[None, :].to(tl.int64) * x_stride
    per_word: tl.constexpr = 4 if FORM == "four" or FORM == "table" else 1
    integers: tl.constexpr = EIGHT and FORM == "integer" and PRECISION != "interpreted"
    sum_type: tl.constexpr = tl.int32 if integers else tl.float32
    # Tensor cores add products of float8 with few bits, so no long sums are left to them.
    in_parts: tl.constexpr = SCALING == "step" or (EIGHT and FORM == "float8")
    sums = tl.zeros([OUTS, ROWS], tl.float32 if in_parts else sum_type)
    if SCALING == "step":  # scales are loaded one step ahead of their use
        at_group = split * span * per_word // GROUP * group_stride
        next_scale, next_offset = tl.load(scale_rows + at_group), tl.load(offset_rows + at_group)
    # Many rows share scaled weights. Scaled products of them would need more registers than there are.
    scales_products: tl.constexpr = SCALING == "quarters" and ROWS <= 32
    if scales_products:
        next_scales = _scales_of_quarters(scale_rows, split * span, ins, group_stride, GROUP)
    for begin in range(split * span, tl.minimum(length, split * span + span), INS):
        place = begin + tl.arange(0, INS)
        if EVEN:
            stored = tl.load(code_rows + place[None, :])
        else:
            stored = tl.load(code_rows + place[None, :], mask=(place < length)[None, :], other=0.0)
        if SCALING == "step":
            scale, offset = next_scale, next_offset
            at_group = tl.minimum(begin + INS, length - 1) * per_word // GROUP * group_stride
            next_scale = tl.load(scale_rows + at_group)
            if OFFSETS:
                next_offset = tl.load(offset_rows + at_group)
        if scales_products:
            quarter_scales = next_scales
            next_scales = _scales_of_quarters(scale_rows, begin + INS, ins, group_stride, GROUP)
        part = sums
        if in_parts:
            part = tl.zeros([OUTS, ROWS], sum_type)
        total = tl.zeros([OUTS if ROWS <= 32 else 1, ROWS], tl.float32)
        for quarter in tl.static_range(per_word):
            if scales_products:
                part = tl.zeros([OUTS, ROWS], sum_type)
            at = place
            if per_word == 4:
                at = place // RUN * (4 * RUN) + place % RUN + quarter * RUN
            mask = is_row[None, :]
            if not EVEN:
                mask = mask & (at < ins)[:, None]
            right = tl.load(x_rows + at[:, None], mask=mask, other=0.0)
            left = stored
            if FORM != "dense" and not EIGHT:
                left = weights_of(
                    stored,
                    table,
                    scale_rows,
                    offset_rows,
                    begin,
                    at,
                    group_stride,
                    ins,
                    quarter,
                    FORM,
                    WORDS,
                    "none" if scales_products else SCALING,
                    OFFSETS,
                    CENTRE,
                    NATIVE,
                    GROUP,
                    PTX,
                    right.dtype,
                )
            part = multiplied(left, right, part, PRECISION)
            if OFFSETS and SCALING == "step":
                if ROWS <= 32:  # Tensor cores have time for it. Made of `left`, the ones get the layout of `left`.
                    total = multiplied((left * 0.0 + 1.0).to(right.dtype), right, total, PRECISION)
                else:
                    total += tl.sum(right.to(tl.float32), 0)[None, :]
            if scales_products:
                sums += part * quarter_scales[quarter].to(tl.float32)[:, None]
        if SCALING == "step":
            sums += part.to(tl.float32) * scale.to(tl.float32)[:, None]
            if OFFSETS:
                sums += offset.to(tl.float32)[:, None] * total
        elif in_parts:
            sums += part
        elif not scales_products:
            sums = part
    results = sums.to(tl.float32)
    if SCALING == "row":
        results *= tl.load(scale_rows).to(tl.float32)[:, None]
    if FACTORS:
        results *= tl.load(factors + weight_rows).to(tl.float32)[:, None]
    if EIGHT:
        results *= tl.load(x_scales + at_rows, mask=is_row, other=0.0)[None, :]
    if BIAS:
        if split == 0:
            results += tl.load(bias + expert * outs + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    at_out = out + (split * rows + at_rows)[None, :].to(tl.int64) * outs + columns[:, None]
    tl.store(at_out, results.to(out.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["rows"])
def _total(out, parts, rows, outs, splits, BLOCK: tl.constexpr):
    """Add the parts of a product, in order. Each has rows * outs elements, as `out` has."""
    size = rows * outs
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(parts + (split * size).to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rounded(x, codes, scales, ins, stride, FLOAT8: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each row. It writes the row as codes of 8 bits, and their scale. BLOCK: at least ins."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < ins
    wide = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    top: tl.constexpr = 448.0 if FLOAT8 else 127.0
    scale = tl.maximum(tl.max(tl.abs(wide)) / top, 1e-30)
    tl.store(scales + row, scale)
    scaled = wide / scale
    if FLOAT8:
        code = to_float8(scaled, NATIVE)
    else:
        shift: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer
        code = ((scaled + shift) - shift).to(tl.int8).to(tl.uint8, bitcast=True)
    tl.store(codes + row * ins + at, code, mask=inside)


def _on_gpu_in_16_bits(target: Target) -> bool:
    return on_gpu(target) and target.dtype.itemsize == 2


@linear.implementation("triton-few-rows", supports=_on_gpu_in_16_bits, invariant_on=())
def linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Few rows take as long as the weights need to arrive, so each program has many loads under way and no second
    kernel adds parts. Other products are computed by torch's library."""
    (outs, ins), size = weight.shape, x.dtype.itemsize
    if suits_few_rows(card_of(x.device), len(x), outs, ins, size) and weight.is_contiguous():
        return _launch(x, None, weight, None, bias, None, "few", x.dtype, False)
    product: Tensor = linear.reference(x, weight, bias)
    return product


@grouped_linear.implementation("triton", supports=on_gpu, invariant_on=())
def grouped_linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, fixed: bool = False
) -> Tensor:
    """fixed: tile and splits do not depend on the number of rows, so that results do not depend on the batch."""
    kind = "float32" if x.dtype is torch.float32 else "dense"
    return _launch(x, None, weight.flatten(0, 1), None, bias, offsets, kind, x.dtype, fixed)


@quantized_linear.implementation("triton", supports=on_gpu, invariant_on=())
def quantized_linear_triton(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, fixed: bool = False) -> Tensor:
    """fixed: see grouped_linear_triton."""
    return _quantized(x, weight, bias, None, fixed)


@grouped_quantized_linear.implementation("triton", supports=on_gpu, invariant_on=())
def grouped_quantized_linear_triton(
    x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, offsets: Tensor, fixed: bool = False
) -> Tensor:
    """fixed: see grouped_linear_triton."""
    return _quantized(x, weight, bias, offsets, fixed)


def _quantized(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, bounds: Tensor | None, fixed: bool) -> Tensor:
    """bounds: offsets of the experts' rows, None if one weight serves all rows."""
    packed = weight if isinstance(weight, PackedMatrix) else pack(weight)
    x = x if packed.order is None else x[:, packed.order]
    if x.dtype is torch.float32:
        return _launch(x, None, packed.codes, packed, bias, bounds, "float32", x.dtype, fixed)
    if packed.bits == 4:
        kind = "table" if packed.table else "four" if packed.offsets is None else "offsets"
        return _launch(x, None, packed.codes, packed, bias, bounds, kind, x.dtype, fixed)
    native = converts_float8(x.device)
    is_float8 = packed.codes.is_floating_point()
    whole = packed.group >= packed.in_features
    if (
        packed.offsets is not None
        or (is_float8 and not (native or INTERPRETED))
        or not (whole or packed.group % 64 == 0)
    ):
        return _launch(x, None, packed.codes, packed, bias, bounds, "wide", x.dtype, fixed)
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, ins = x.shape
    codes, scales = torch.empty_like(x, dtype=torch.uint8), x.new_empty(rows, dtype=torch.float32)
    if rows:
        block = triton.next_power_of_2(ins)
        _rounded[(rows,)](
            x,
            codes,
            scales,
            ins,
            x.stride(0),
            is_float8,
            native,
            block,
            num_warps=min(max(block // 1024, 1), 16),
            enable_fp_fusion=True,
        )
    codes = codes.view(packed.codes.dtype)
    kind = "float8" if is_float8 else "int8"
    return _launch(codes, scales, packed.codes, packed, bias, bounds, kind, x.dtype, fixed)


def _scaling(weight: PackedMatrix, step: int) -> tuple[str, int]:
    """(SCALING, INS) of a product whose loop would take `step` words of a row of weights at a time."""
    if weight.group >= weight.in_features and weight.offsets is None:
        return "row", step
    if weight.bits == 4 and weight.run == weight.group:
        return "quarters", min(step, weight.group & -weight.group)
    group, rest = divmod(weight.group, 4 if weight.bits == 4 else 1)  # in words
    even = group & -group  # the largest power of two that divides it
    if not rest and even >= min(step, 64):
        return "step", min(step, even)
    return ("groups" if not rest and even == group and group >= 4 else "any"), step


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Tensor,
    weight: PackedMatrix | None,
    bias: Tensor | None,
    bounds: Tensor | None,
    kind: str,
    dtype: torch.dtype,
    fixed: bool,
) -> Tensor:
    """codes: of all outputs, or dense weights. weight: what the codes mean. kind: see tiles.py. dtype: of results."""
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    rows, ins = x.shape
    experts = 1 if bounds is None else len(bounds) - 1
    outs = len(codes) // experts
    out = x.new_empty(rows, outs, dtype=dtype)
    if not out.numel():
        return out
    per_word, form, scaling, group = 1, "dense", "none", 1
    scales, offsets, factors, table = x, None, None, None
    if weight is not None:
        group, form, scales, offsets = weight.group, "integer", weight.scales, weight.offsets
        factors, table = weight.factors, weight.table
        if weight.bits == 4:
            per_word, form, codes = 4, "four" if table is None else "table", codes.view(torch.int16)
        if codes.is_floating_point():
            form, codes = "float8", codes if x_scales is not None else codes.view(torch.uint8)
    card, length = card_of(x.device), codes.shape[1]
    tile = tile_of(card, kind, _FIXED_ROWS * experts if fixed else rows, outs, length, experts)
    step = tile.ins
    if weight is not None:
        scaling, step = _scaling(weight, step)
    span = triton.cdiv(length, step * tile.splits) * step
    splits = triton.cdiv(length, span)
    parts = out if splits == 1 else torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(rows, tile.rows)
    if bounds is not None:
        tiles = min(rows, rows // tile.rows + experts)  # each expert has at most one tile that is not full
    is_native = converts_float8(x.device)
    has_ptx = card.backend == "cuda" and not INTERPRETED and dtype is not torch.float32
    _product[(tiles * triton.cdiv(outs, tile.outs), splits)](
        parts,
        x,
        x if x_scales is None else x_scales,
        codes,
        codes if table is None or has_ptx else tensor_of(table, x.device, dtype),
        scales,
        scales if offsets is None else offsets,
        scales if factors is None else factors,
        x if bias is None else bias.contiguous(),
        x if bounds is None else bounds,
        rows,
        tiles,
        experts,
        outs,
        ins,
        length,
        span,
        x.stride(0),
        codes.stride(0),
        scales.stride(0),
        scales.stride(1),
        form,
        words_of(table, dtype) if table and has_ptx else None,
        x_scales is not None,
        scaling,
        offsets is not None,
        factors is not None,
        8 if form == "four" and offsets is None else 0,
        1 if scaling in ("none", "row") else group,
        1 if weight is None else weight.run,
        bias is not None,
        0 if bounds is None else triton.next_power_of_2(experts),
        length % step == 0 and ins == length * per_word,
        is_native,
        has_ptx,
        tile.rows,
        tile.outs,
        step,
        precision(dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
        **(card.most_registers(tile.warps, tile.programs) if offsets is not None or table else {}),
    )
    if splits > 1:
        _total[(triton.cdiv(out.numel(), 512),)](
            out, parts, rows, outs, splits, 512, num_warps=2, enable_fp_fusion=True
        )
    return out


def _register_fixed(op: Op, function: Function) -> Function:
    """Register `function` with a fixed tile beside itself, for results that must not depend on the batch."""
    return op.implementation("triton-fixed", supports=on_gpu_in_any_batch)(partial(function, fixed=True))


def _join(weights: Sequence[object]) -> object | None:
    """The weights of all experts in one, if they have the same form."""
    matrices = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
    merged = concatenate(matrices) if len(matrices) == len(weights) else []
    return pack(merged[0]) if len(merged) == 1 else None


_register_fixed(grouped_linear, grouped_linear_triton)
_fixed = _register_fixed(grouped_quantized_linear, grouped_quantized_linear_triton)
for _function in (grouped_quantized_linear_triton, _fixed):
    _function.join = _join  # type: ignore[attr-defined]
for _function in (quantized_linear_triton, _register_fixed(quantized_linear, quantized_linear_triton)):
    _function.pack = pack  # type: ignore[attr-defined]
