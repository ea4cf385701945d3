"""Merges partial results of attention in float32, with one program for each token and head."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import elementwise as reference
from quire.ops.triton.targets import on_gpu


@triton.jit
def _merge_partials(
    out,
    lse,
    outs,
    lses,
    sinks,
    heads,
    part_stride,
    token_stride,
    head_stride,
    rows,
    dim,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and head. lses: [PARTS, rows]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    token = row // heads
    head = row % heads
    inside = columns < dim
    top = tl.load(sinks + head) if SINKS else float("-inf")
    for part in tl.static_range(PARTS):
        top = tl.maximum(top, tl.load(lses + part * rows + row))
    base = tl.where(top == float("-inf"), 0.0, top)  # for queries that have seen no key
    total = tl.exp(tl.load(sinks + head) - base) if SINKS else 0.0
    merged = tl.zeros([BLOCK], tl.float32)
    outs += token * token_stride + head * head_stride
    for part in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses + part * rows + row) - base)
        values = tl.load(outs + part * part_stride + columns, mask=inside, other=0.0).to(tl.float32)
        merged += tl.where(weight > 0, values * weight, 0.0)
        total += weight
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(out + row * dim + columns, (merged / divisor).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, tl.where(total > 0, tl.log(divisor) + base, float("-inf")))


@reference.merge_partials.implementation("triton", supports=on_gpu)
def merge_partials(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if outs.stride(-1) != 1:
        outs = outs.contiguous()
    parts, tokens, heads, dim = outs.shape
    lses = lses.contiguous()
    out = outs.new_empty(tokens, heads, dim)
    lse = lses.new_empty(tokens, heads)
    if tokens:
        _merge_partials[(tokens * heads,)](
            out,
            lse,
            outs,
            lses,
            lses if sinks is None else sinks,
            heads,
            *outs.stride()[:3],
            tokens * heads,
            dim,
            parts,
            sinks is not None,
            triton.next_power_of_2(dim),
            num_warps=1,
            enable_fp_fusion=True,
        )
    return out, lse
