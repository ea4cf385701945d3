"""Products with dense weights whose results are bitwise independent of the number of rows, for --batch-invariant.

cuBLAS chooses tiles and splits by the number of rows, so a token's result depends on the batch. Here each card has one
tile size, for one row as for thousands, and an output is summed in an order that depends only on the shape of the
weight: the inputs are divided into parts, each part is summed from zero, and the sums of the parts are added in order.
With few rows, a program computes one part of a tile, so that all multiprocessors read weights, and a second kernel adds
the parts. With many rows, a program computes all parts of its tile in order.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.elementwise import combine_experts, linear, linear_by_head
from quire.ops.reference.routing import Routing, choose_experts
from quire.ops.triton.linear_kernels import multiplied
from quire.ops.triton.sums import row_sums_triton
from quire.ops.triton.targets import on_gpu, on_gpu_in_any_batch, precision
from quire.platform.gpu.cards import card_of


@dataclass(frozen=True)
class Tile:
    """A program computes rows x outs results, from `ins` inputs at a time."""

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int


_BAND = 8  # consecutive tiles of rows, which read the same weights while these are in the card's cache


@triton.jit(do_not_specialize=["rows"])
def _dense(
    out,
    parts,
    x,
    weight,
    bias,
    rows,
    outs,
    ins,
    part,
    x_stride,
    x_head_stride,
    weight_stride,
    weight_head_stride,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program computes ROWS x OUTS results of a head (program_id(1)), or with PARTS one part of their sums.

    part: the inputs of a part, a multiple of INS. WHOLE: whether ins is a multiple of INS. out: [rows, heads, outs];
    parts: [parts, rows, heads, outs] in float32.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    band = tile // (BAND * tl.cdiv(outs, OUTS)) * BAND
    height = tl.minimum(tl.cdiv(rows, ROWS) - band, BAND)
    inside = tile - band * tl.cdiv(outs, OUTS)
    at_rows = (band + inside % height) * ROWS + tl.arange(0, ROWS)
    columns = inside // height * OUTS + tl.arange(0, OUTS)
    is_row = at_rows < rows
    is_column = columns < outs
    inner = tl.arange(0, INS)
    x_rows = x + head.to(tl.int64) * x_head_stride + at_rows[:, None].to(tl.int64) * x_stride + inner[None, :]
    columns_read = tl.minimum(columns, outs - 1).to(tl.int64)
    weights = weight + head.to(tl.int64) * weight_head_stride + columns_read[None, :] * weight_stride + inner[:, None]
    first = 0
    stop = ins
    if PARTS:
        first = tl.program_id(2) * part
        stop = tl.minimum(first + part, ins)
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(first, stop, part):
        sums = tl.zeros([ROWS, OUTS], tl.float32)
        for begin in range(start, tl.minimum(start + part, ins), INS):
            if WHOLE:
                a = tl.load(x_rows + begin, mask=is_row[:, None], other=0.0)
                b = tl.load(weights + begin)
            else:
                is_input = begin + inner < ins
                a = tl.load(x_rows + begin, mask=is_row[:, None] & is_input[None, :], other=0.0)
                b = tl.load(weights + begin, mask=is_input[:, None], other=0.0)
            sums = multiplied(a, b, sums, PRECISION)
        total += sums
    places = (at_rows[:, None].to(tl.int64) * heads + head) * outs + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if PARTS:
        tl.store(parts + tl.program_id(2).to(tl.int64) * rows * heads * outs + places, total, mask=mask)
    else:
        if BIAS:
            total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _add_parts(out, parts, bias, rows, outs, count, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of parts, [count, rows, outs], to out, [rows, outs], in the order in which `_dense` adds them."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < outs
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(count):
        total += tl.load(parts + (part * rows.to(tl.int64) + row) * outs + columns, mask=is_column, other=0.0)
    if BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * outs + columns, total.to(out.dtype.element_ty), mask=is_column)


# One tile for all cards and all numbers of rows. Compiled for 8.0, 9.0, 10.0 and 12.0 with Triton 3.6 and 3.9:
#   16 bits: wgmma on 9.0 (128 KiB of shared memory, 177 registers), tcgen05 on 10.0 (128 KiB, 166), mma.sync on 8.0 and
#            12.0 (96 KiB, 232); one program a processor, no spills. A single row takes as long as 128 rows. This costs
#            nothing while all processors are busy: tensor cores compute 128 rows of 2-byte weights faster than the
#            memory delivers the weights. For long prompts, x and weights are read from the cache of the card more often
#            than with cuBLAS' tiles of 128 x 256; such a tile would spill here, since there are two sums.
#   float32: no tensor cores (128 registers). With a tile of 64 rows, computing a single row would take longer than
#            reading the weights.
_TILE_OF_16_BITS = Tile(128, 128, 64, 8, 4)
_TILE_OF_FLOAT32 = Tile(32, 64, 32, 4, 3)
_SMALLEST_PART = 512  # inputs
_MOST_PARTS = 8


@cache
def _part(tiles: int, ins: int, step: int, processors: int) -> int:
    """Return the number of inputs of a part, such that one row keeps the card's multiprocessors busy.

    tiles: the tiles of one row's outputs. step: the inputs that a program reads at a time. Each additional part must
    save 3 % of the time.
    """
    most = max(1, min(_MOST_PARTS, ins // _SMALLEST_PART))
    best = min(range(1, most + 1), key=lambda parts: -(-tiles * parts // processors) / parts * 1.03**parts)
    return -(-ins // (best * step)) * step


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [rows, heads, ins], weight: [heads, outs, ins], bias: [outs] -> [rows, heads, outs]"""
    x = x if x.stride(2) == 1 else x.contiguous()
    weight = weight if weight.stride(2) == 1 else weight.contiguous()
    rows, heads, ins = x.shape
    outs = weight.shape[1]
    out = x.new_empty(rows, heads, outs)
    if not out.numel():
        return out
    card = card_of(x.device)
    tile = _TILE_OF_FLOAT32 if x.dtype is torch.float32 else _TILE_OF_16_BITS
    tiles = triton.cdiv(outs, tile.outs)
    part = _part(tiles * heads, ins, tile.ins, card.processors)
    count = triton.cdiv(ins, part)
    row_tiles = triton.cdiv(rows, tile.rows)
    is_divided = count > 1 and row_tiles * tiles * heads < card.processors
    parts = torch.empty(count, rows, heads, outs, dtype=torch.float32, device=x.device) if is_divided else out
    added = x if bias is None else bias.contiguous()
    _dense[(row_tiles * tiles, heads, count if is_divided else 1)](
        out,
        parts,
        x,
        weight,
        added,
        rows,
        outs,
        ins,
        part,
        x.stride(0),
        x.stride(1),
        weight.stride(1),
        weight.stride(0),
        bias is not None,
        is_divided,
        ins % tile.ins == 0,
        _BAND,
        tile.rows,
        tile.outs,
        tile.ins,
        precision(x.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    if is_divided:
        _add_parts[(rows, triton.cdiv(heads * outs, 1024))](
            out, parts, added, rows, heads * outs, count, bias is not None, 1024, enable_fp_fusion=True
        )
    return out


@linear.implementation("triton", supports=on_gpu_in_any_batch)
def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _product(x[:, None], weight[None], bias)[:, 0]


@linear_by_head.implementation("triton", supports=on_gpu_in_any_batch)
def linear_by_head_triton(x: Tensor, weight: Tensor) -> Tensor:
    return _product(x, weight, None)


@triton.jit
def _combine(combined, out, places, weights, dim, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each token and BLOCK elements. places: [tokens, TOP_K], the row of each expert's result in
    `out`."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + choice)
        weight = tl.load(weights + token * TOP_K + choice).to(dtype).to(tl.float32)
        total += weight * tl.load(out + place * dim + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(combined + token * dim + columns, total.to(dtype), mask=inside)


@choose_experts.implementation("triton", supports=on_gpu)
def choose_experts_triton(logits: Tensor, correction_bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Use torch's implementation, except for sums, which do not depend on the other rows here."""
    return choose_experts.reference(logits, correction_bias, routing, row_sums_triton)  # type: ignore[no-any-return]


@combine_experts.implementation("triton", supports=on_gpu)
def combine_experts_triton(out: Tensor, order: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return combine_experts.reference(out, order, None)  # type: ignore[no-any-return]
    tokens, top_k = weights.shape
    out, weights, dim = out.contiguous(), weights.contiguous(), out.shape[1]
    combined = out.new_empty(tokens, dim)
    if combined.numel():
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        _combine[(tokens, triton.cdiv(dim, 1024))](
            combined, out, places, weights, dim, top_k, 1024, enable_fp_fusion=True
        )
    return combined
