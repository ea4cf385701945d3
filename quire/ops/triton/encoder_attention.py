"""Attention within concatenated whole sequences, by an online softmax over tiles of keys (arXiv:2205.14135).

A program computes one head and some neighbouring queries of one sequence, which the kernel itself finds, so a launch
depends only on the numbers of tokens and sequences. Its tiles of keys begin where its sequence or the reach of its
queries begins, so the bits of a result do not depend on other sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.encoder_attention import encoder_attention
from quire.ops.triton.attention import biases
from quire.ops.triton.linear_kernels import multiplied, part_of
from quire.ops.triton.targets import on_gpu, precision

_KEYS = 32  # per iteration; more do not fit into the registers of 12.0
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=["starts"])
def _attend_whole(
    out,
    q,
    k,
    v,
    starts,
    bias,
    sequences,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    heads,
    group,
    scale,
    reach,
    farthest,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BANDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BIASED: tl.constexpr = False,
):
    """DIM: elements of a head. WIDTH: the same with padding, a power of two. BANDED: whether there is a reach. BIASED:
    whether there are biases, indexed by the distance of a key up to `farthest`."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = part_of(starts, tile, sequences, QUERIES)
    begin = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    first = begin + (tile - begin // QUERIES - sequence) * QUERIES
    if first >= end:
        return
    column = tl.arange(0, WIDTH)
    query = first + tl.arange(0, QUERIES)
    inside = column < DIM
    rows = query.to(tl.int64)[:, None]
    exists = (query < end)[:, None] & inside[None, :]
    queries = tl.load(q + rows * q_stride + head * q_head + column[None, :], mask=exists, other=0.0)
    low = begin
    high = end
    if BANDED:
        low = tl.maximum(begin, first - reach)
        high = tl.minimum(end, first + QUERIES + reach)
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    k += head // group * k_head
    v += head // group * v_head
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        known = key < high
        places = key.to(tl.int64)
        keys = tl.load(
            k + places[None, :] * k_stride + column[:, None], mask=known[None, :] & inside[:, None], other=0.0
        )
        scores = multiplied(queries, keys, tl.zeros([QUERIES, KEYS], tl.float32), PRECISION) * (scale * _LOG2_E)
        if BIASED:
            table = bias + head * (2 * farthest + 1)
            scores += biases(table, key[None, :] - query[:, None], farthest, known[None, :]) * _LOG2_E
        seen = known[None, :]
        if BANDED:
            seen = seen & (tl.abs(query[:, None] - key[None, :]) <= reach)
        scores = tl.where(seen, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        values = tl.load(
            v + places[:, None] * v_stride + column[None, :], mask=known[:, None] & inside[None, :], other=0.0
        )
        sums = multiplied(weights.to(values.dtype), values, sums * shrink[:, None], PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        largest = larger
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + (rows * heads + head) * DIM + column[None, :], result, mask=exists)


@encoder_attention.implementation("triton", supports=on_gpu)
def encoder_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, reach: int | None, bias: Tensor | None = None
) -> Tensor:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sequences = len(starts) - 1
    width = max(16, triton.next_power_of_2(dim))
    is_small = width <= 128 and q.dtype is not torch.float32
    queries, (warps, stages) = 64 if is_small else 32, (4, 2) if width <= 128 else (8, 1)
    if tokens:
        _attend_whole[(tokens // queries + sequences, heads)](
            out,
            q,
            k,
            v,
            starts,
            starts if bias is None else bias,
            sequences,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            heads,
            heads // k.shape[1],
            scale,
            reach or 0,
            0 if bias is None else bias.shape[1] // 2,
            dim,
            width,
            queries,
            _KEYS,
            reach is not None,
            precision(q.dtype),
            bias is not None,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=True,
        )
    return out
