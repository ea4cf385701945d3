"""The indexer of sparse attention (quire/layers/indexer.py): scores of keys, and the slots of those with the highest.

The first kernel writes the scores; the second finds the lowest selected score and writes the slots. A launch depends
only on the numbers of tokens and of blocks in the table, and a token's results only on its own request.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.attention.base import Selection
from quire.ops.triton.attention import _decoded, _scales
from quire.ops.triton.linear_kernels import multiplied
from quire.ops.triton.sampling_kernels import _above, _key, _threshold
from quire.ops.triton.targets import precision

CELLS = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2}
_KEYS = 64  # per product
_RUN = 512  # keys of a program
_MOST_SCORES = 1 << 26  # in memory at a time
_BLOCK = 2048


@triton.jit(do_not_specialize=["table_stride", "width"], do_not_specialize_on_alignment=["block_table", "rows", "seen"])
def _index_scores(
    scores,
    q,
    weights,
    cache,
    block_table,
    rows,
    seen,
    block_stride,
    table_stride,
    width,
    heads,
    most,
    is_always: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    RUN: tl.constexpr,
    CELL: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program for each token and RUN keys. is_always: whether scores are computed even if all keys are selected.
    HEADS, COLUMNS: powers of two, at least heads and DIM."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * RUN
    count = tl.load(seen + token)
    if first >= count:
        return
    if not is_always:
        if count <= most:
            return
    head = tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    in_tile = tl.arange(0, KEYS)
    mask = (head < heads)[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + (token * heads + head)[:, None] * DIM + column[None, :], mask=mask, other=0.0)
    of_heads = tl.load(weights + token * heads + head, mask=head < heads, other=0.0).to(tl.float32)
    table = block_table + tl.load(rows + token).to(tl.int64) * table_stride
    dtype: tl.constexpr = q.dtype.element_ty
    for begin in range(first, tl.minimum(first + RUN, count), KEYS):
        key = begin + in_tile
        exists = key < count
        block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0)
        entry = cache + block.to(tl.int64) * block_stride
        addresses = (entry + key % BLOCK_SIZE * DIM)[:, None] + column[None, :]
        keys = tl.load(addresses, mask=exists[:, None] & (column < DIM)[None, :], other=0)
        if CELL:
            keys = _decoded(keys, dtype, CELL, NATIVE)
        products = multiplied(queries, tl.trans(keys), tl.zeros([HEADS, KEYS], tl.float32), PRECISION)
        if CELL:
            factors = tl.load(_scales(entry + BLOCK_SIZE * DIM) + key % BLOCK_SIZE, mask=exists, other=0.0)
            products *= factors[None, :]
        total = tl.sum(tl.maximum(products, 0.0) * of_heads[:, None], 0)
        tl.store(scores + token * width + key, total, mask=exists)


@triton.jit(do_not_specialize=["table_stride", "width"], do_not_specialize_on_alignment=["block_table", "rows", "seen"])
def _select_slots(
    slots,
    best,
    scores,
    block_table,
    rows,
    seen,
    table_stride,
    width,
    most,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token. best: None, or receives the scores of the selected keys; `slots` then receives their
    indices."""
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(seen + token)
    table = block_table + tl.load(rows + token).to(tl.int64) * table_stride
    slots += token * most
    scores += token * width
    wanted = tl.minimum(count, most)
    least = tl.zeros([], tl.uint32)  # less than the key of every score
    equal = tl.zeros([], tl.float32)  # number of selected keys with the lowest score
    if count > most:
        top = tl.zeros([], tl.float32)
        least = _threshold(scores, count, top, least, wanted.to(tl.float32), False, BLOCK // 2)
        larger, _ = _above(scores, count, top, least, BLOCK)
        equal = wanted.to(tl.float32) - larger
    selected = 0
    equal_before = tl.zeros([], tl.int32)
    for begin in range(0, count, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        exists = position < count
        is_selected = exists
        if count > most:
            key = _key(tl.load(scores + position, mask=exists, other=float("-inf")))
            is_equal = exists & (key == least)
            order = equal_before + tl.cumsum(is_equal.to(tl.int32), 0)
            is_selected = (exists & (key > least)) | (is_equal & (order.to(tl.float32) <= equal))
            equal_before += tl.sum(is_equal.to(tl.int32))
        to = selected - 1 + tl.cumsum(is_selected.to(tl.int32), 0)
        if best is None:
            block = tl.load(table + position // BLOCK_SIZE, mask=is_selected, other=0)
            tl.store(slots + to, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_selected)
        else:
            tl.store(slots + to, position, mask=is_selected)
            tl.store(best + token * most + to, tl.load(scores + position, mask=is_selected), mask=is_selected)
        selected += tl.sum(is_selected.to(tl.int32))


def select(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    selection: Selection,
    block_size: int,
    cell: torch.dtype | None,
    has_float8: bool,
) -> None:
    """See AttentionBackend.select. cache: a cache of latents, see quire/ops/triton/attention.py."""
    q = q.contiguous()
    weights = weights.contiguous()
    s = selection
    tokens, heads, dim = q.shape
    table = s.block_table
    most = s.slots.shape[1]
    width = s.block_table.shape[1] * block_size
    at_once = max(1, _MOST_SCORES // width)
    scores = torch.empty(min(tokens, at_once), width, dtype=torch.float32, device=q.device)
    for first in range(0, tokens, at_once):
        part = slice(first, min(first + at_once, tokens))
        rows = s.rows[part]
        seen = s.seen[part]
        count = part.stop - first
        if width > most or s.scores is not None:
            _index_scores[(count, triton.cdiv(width, _RUN))](
                scores,
                q[part],
                weights[part],
                cache,
                table,
                rows,
                seen,
                cache.stride(0),
                table.stride(0),
                width,
                heads,
                most,
                s.scores is not None,
                dim,
                max(16, triton.next_power_of_2(dim)),
                max(16, triton.next_power_of_2(heads)),
                block_size,
                _KEYS,
                _RUN,
                CELLS[cell],
                has_float8,
                precision(q.dtype),
                num_warps=4,
                num_stages=3,
                enable_fp_fusion=False,
            )
        _select_slots[(count,)](
            s.slots[part],
            None if s.scores is None else s.scores[part],
            scores,
            table,
            rows,
            seen,
            table.stride(0),
            width,
            most,
            block_size,
            _BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
