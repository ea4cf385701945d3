"""Drawing tokens, with no synchronization: a program for each part of a row, then the best of the parts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import sampling as reference
from quire.ops.triton import on_gpu

_PART = 8192  # tokens of a program
_BLOCK = 1024  # tokens at a time


@triton.jit
def _gumbel(word):
    """Noise from 32 random bits, as the reference defines it."""
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _first_best(value, token, best, best_token):
    """The larger value, of equal ones that of the smaller token."""
    better = (value > best) | ((value == best) & (token < best_token))
    return tl.where(better, value, best), tl.where(better, token, best_token)


@triton.jit
def _sample(
    logits, seeds, positions, best, best_token, row_stride, stride, vocab, parts, PART: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, position = tl.load(seeds + row), tl.load(positions + row).to(tl.uint32)
    top = tl.full([BLOCK // 4], float("-inf"), tl.float32)
    token = tl.full([BLOCK // 4], 2147483647, tl.int32)
    for begin in range(part * PART, tl.minimum((part + 1) * PART, vocab), BLOCK):
        group = begin // 4 + tl.arange(0, BLOCK // 4)
        zero = tl.zeros_like(group).to(tl.uint32)
        words = tl.philox(seed, group.to(tl.uint32), zero + position, zero, zero)
        for i in tl.static_range(4):
            at = group * 4 + i
            value = tl.load(logits + row * row_stride + at.to(tl.int64) * stride, mask=at < vocab, other=float("-inf"))
            value = tl.where(value == float("-inf"), value, value + _gumbel(words[i]))
            top, token = _first_best(value, at, top, token)
    value = tl.max(top)
    tl.store(best + row * parts + part, value)
    tl.store(best_token + row * parts + part, tl.min(tl.where(top == value, token, 2147483647)))


@reference.sample_gumbel.implementation("triton", supports=on_gpu)
def sample_gumbel(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _PART)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    if not rows:
        return tokens.new_empty(0, dtype=torch.int64)
    _sample[(rows, parts)](
        logits, seeds, positions, best, tokens, logits.stride(0), logits.stride(1), vocab, parts, _PART, _BLOCK
    )
    return tokens.gather(1, best.argmax(1, keepdim=True)).squeeze(1).long()
