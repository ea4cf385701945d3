"""The kernels of linear.py."""

import triton
import triton.language as tl

from quire.ops.triton.targets import wait_for_previous
from quire.ops.triton.weights import group_of_quarter, weights_of


@triton.jit
def multiplied(a, b, sums, PRECISION: tl.constexpr):
    """sums + a b"""
    return tl.dot(a, b, sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def part_of(bounds, tile, parts, SIZE: tl.constexpr):
    """Return the index of the part, out of `parts`, to which a tile of SIZE rows belongs.

    Part i has the rows bounds[i] : bounds[i + 1], and its first tile is bounds[i] // SIZE + i.
    """
    low = 0
    high = parts
    while low < high:
        middle = (low + high) // 2
        if tl.load(bounds + middle) // SIZE + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _rows_of(bounds, tile, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return (expert, first row, end of the expert's rows) of a tile, if each expert has exactly as many tiles as it
    needs.

    EXPERTS: a power of two, at least `experts`. After the last tile, the expert is `experts` or more.
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
    OVERLAPPED: tl.constexpr,
):
    """A program computes ROWS x OUTS results (of one expert, if there are experts) from `span` of the `length` words in
    each row of weights. A word is an element, or four codes of 4 bits. The results are written to the part of `out` for
    these inputs.

    FORM: the form of the weights, "dense", "integer", "float8", "four", or "table": four bits that represent values in
    `table`, or in WORDS (see words_of) if PTX. EIGHT: x also has codes of 8 bits, with a scale for each row. SCALING:
    "none"; "row" if an output has one scale; "step" if the weights of an output in one step of the loop share a scale;
    "quarters" if those in the same quarter of their words do; "groups" if a step has several whole groups of GROUP
    inputs; "any" for other groups. EVEN: inputs need no masks. PTX: instructions of NVIDIA cards may be used.
    OVERLAPPED: see targets.overlaps_launches.
    """
    wait_for_previous(OVERLAPPED)
    neighbours: tl.constexpr = 8  # this many tiles of rows read the same weights in turn, from the L2 cache
    blocks = tl.cdiv(outs, OUTS)
    first_tile = tl.program_id(0) // (neighbours * blocks) * neighbours
    index = tl.program_id(0) - first_tile * blocks
    count = tl.minimum(tiles - first_tile, neighbours)
    tile = first_tile + index % count
    block = index // count
    split = tl.program_id(1)
    expert = tile * 0
    first = tile * ROWS
    stop = rows
    if EXPERTS:
        expert, first, stop = _rows_of(bounds, tile, experts, EXPERTS, ROWS)
        if expert >= experts:
            return
    at_rows = first + tl.arange(0, ROWS)
    columns = block * OUTS + tl.arange(0, OUTS)
    is_row = at_rows < stop
    is_column = columns < outs
    weight_rows = (expert * outs + tl.minimum(columns, outs - 1)).to(tl.int64)
    code_rows = codes + weight_rows[:, None] * code_stride
    scale_rows = scales + weight_rows * scale_stride
    offset_rows = offsets + weight_rows * scale_stride
    x_rows = x + at_rows[None, :].to(tl.int64) * x_stride
    per_word: tl.constexpr = 4 if FORM == "four" or FORM == "table" else 1
    integers: tl.constexpr = EIGHT and FORM == "integer"
    sum_type: tl.constexpr = tl.int32 if integers else tl.float32
    # Tensor cores add float8 products with few bits, so they compute no long sums.
    in_parts: tl.constexpr = SCALING == "step" or (EIGHT and FORM == "float8")
    sums = tl.zeros([OUTS, ROWS], tl.float32 if in_parts else sum_type)
    if SCALING == "step":  # scales are loaded one step ahead of their use
        at_group = split * span * per_word // GROUP * group_stride
        next_scale = tl.load(scale_rows + at_group)
        next_offset = tl.load(offset_rows + at_group)
    # With many rows, the weights are scaled. Scaling their products would need too many registers.
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
            scale = next_scale
            offset = next_offset
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
                if ROWS <= 32:  # Tensor cores are not busy. The ones are computed from `left`, to get its layout.
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
def _total(out, parts, rows, outs, splits, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr):
    """Add the parts of a product, in order. Each has rows * outs elements, like `out`."""
    wait_for_previous(OVERLAPPED)
    size = rows * outs
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(parts + (split * size).to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
