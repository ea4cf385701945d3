"""Sums over rows in a fixed order. torch's order depends on the number of rows and on the row's address."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.elementwise import row_sums
from quire.ops.reference.sampling import log_softmax
from quire.ops.triton.targets import on_gpu

_BLOCK = 2048  # elements per iteration


@triton.jit
def _log_probabilities(logits, out, row_stride, vocab, BLOCK: tl.constexpr):
    """One program for each row, which it reads twice."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        x = tl.load(logits + row * row_stride + begin + columns, mask=begin + columns < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        new_tops = tl.maximum(tops, x)
        base = tl.where(new_tops == float("-inf"), 0.0, new_tops)
        totals = totals * tl.exp(tops - base) + tl.exp(x - base)
        tops = new_tops
    top = tl.max(tops)
    total = tl.log(tl.sum(totals * tl.exp(tops - top)))
    for begin in range(0, vocab, BLOCK):
        inside = begin + columns < vocab
        x = tl.load(logits + row * row_stride + begin + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * vocab + begin + columns, x - top - total, mask=inside)


@log_softmax.implementation("triton", supports=on_gpu)
def log_softmax_triton(logits: Tensor) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(vocab))
        _log_probabilities[(rows,)](logits, out, logits.stride(0), vocab, block, num_warps=8, enable_fp_fusion=True)
    return out


@triton.jit
def _row_sums(x, out, row_stride, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    totals = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, dim, BLOCK):
        totals += tl.load(x + row * row_stride + begin + columns, mask=begin + columns < dim, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(totals))


@row_sums.implementation("triton", supports=on_gpu)
def row_sums_triton(x: Tensor) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, dim = x.shape
    out = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(max(dim, 1)))
        _row_sums[(rows,)](x, out, x.stride(0), dim, block, num_warps=1 if block <= 128 else 8, enable_fp_fusion=True)
    return out
