"""Drawing tokens without synchronization. Each program finds the best token of one part of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import sampling as reference
from quire.ops.triton import on_gpu

_PART = 8192  # tokens of a program
_BLOCK = 1024  # tokens of an iteration


@triton.jit
def _gumbel(word):
    """Noise from 32 random bits, as the reference defines it."""
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _first_best(value, token, best, best_token):
    """The larger value and its token; of equal values, the smaller token."""
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
            t = group * 4 + i
            value = tl.load(logits + row * row_stride + t.to(tl.int64) * stride, mask=t < vocab, other=float("-inf"))
            value = tl.where(value == float("-inf"), value, value + _gumbel(words[i]))
            top, token = _first_best(value, t, top, token)
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


@triton.jit
def _key(x):
    """Map floats to unsigned integers of the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return (bits ^ ((bits >> 31) & 2147483647) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _number(key):
    """The inverse of _key."""
    bits = key.to(tl.int32, bitcast=True) ^ -2147483648
    return (bits ^ ((bits >> 31) & 2147483647)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(row, stride, vocab, top, floor, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that, among the keys above `floor`, at least `wanted` keys are not smaller than it.

    With MASS, `wanted` is not a count but a sum of exp(number - top). The search fixes four bits in each iteration.
    """
    found = floor * 0
    for digit in tl.static_range(8):
        candidates = found + (tl.arange(0, 16).to(tl.uint32) << (28 - 4 * digit))
        totals = tl.zeros([16], tl.float32)
        for begin in range(0, vocab, BLOCK):
            tokens = begin + tl.arange(0, BLOCK)
            x = tl.load(row + tokens.to(tl.int64) * stride, mask=tokens < vocab, other=float("-inf"))
            key = _key(x)
            counted = (tokens < vocab) & (key > floor)
            if MASS:
                weight = tl.where(counted, tl.exp(x - top), 0.0)
            else:
                weight = counted.to(tl.float32)
            totals += tl.sum(tl.where(key[:, None] >= candidates[None, :], weight[:, None], 0.0), 0)
        reached = tl.maximum(tl.sum((totals >= wanted).to(tl.int32)) - 1, 0)
        found = found + (reached.to(tl.uint32) << (28 - 4 * digit))
    return found


@triton.jit
def _above(row, stride, vocab, top, key, BLOCK: tl.constexpr):
    """How many keys are larger than `key`, and the sum of exp(number - top) over them."""
    count = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        tokens = begin + tl.arange(0, BLOCK)
        x = tl.load(row + tokens.to(tl.int64) * stride, mask=tokens < vocab, other=float("-inf"))
        counted = (tokens < vocab) & (_key(x) > key)
        count += counted.to(tl.float32)
        mass += tl.where(counted, tl.exp(x - top), 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def _keep(
    logits, top_k, top_p, row_stride, stride, vocab, TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each row. It keeps the logits above a bound, and the first few of those equal to the bound."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    k, p = vocab, 1.0
    if TOP_K:
        k = tl.minimum(tl.load(top_k + index), vocab).to(tl.int32)
    if TOP_P:
        p = tl.load(top_p + index)
    if (k >= vocab) & (p >= 1.0):
        return
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCK):
        tokens = begin + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, tl.load(row + tokens.to(tl.int64) * stride, mask=tokens < vocab, other=float("-inf")))
    top = tl.max(tops)
    bound = _key(top) * 0  # below every key
    equals = tl.full([], 0.0, tl.float32)  # how many logits equal to the bound stay
    if TOP_K:
        if k < vocab:
            bound = _threshold(row, stride, vocab, top, bound, k.to(tl.float32), False, BLOCK)
            larger, _ = _above(row, stride, vocab, top, bound, BLOCK)
            equals = k.to(tl.float32) - larger
    if TOP_P:
        if p < 1.0:
            _, mass = _above(row, stride, vocab, top, bound, BLOCK)
            weight = tl.exp(_number(bound) - top)
            if equals == 0.0:
                weight = equals
            wanted = p * (mass + equals * weight)
            if mass >= wanted:  # even without the logits equal to the bound
                bound = _threshold(row, stride, vocab, top, bound, wanted, True, BLOCK)
                _, mass = _above(row, stride, vocab, top, bound, BLOCK)
                weight = tl.exp(_number(bound) - top)
                equals = tl.full([], 16777216.0, tl.float32)
            # Triton 3.6 would take a constant below 2^-126 for a float64.
            equals = tl.minimum(equals, tl.maximum(tl.ceil((wanted - mass) / tl.maximum(weight, 1.2e-38)), 1.0))
    seen = 0
    for begin in range(0, vocab, BLOCK):
        tokens = begin + tl.arange(0, BLOCK)
        x = tl.load(row + tokens.to(tl.int64) * stride, mask=tokens < vocab, other=float("-inf"))
        key = _key(x)
        same = (key == bound) & (tokens < vocab)
        order = seen + tl.cumsum(same.to(tl.int32), 0)
        stays = (key > bound) | (same & (order.to(tl.float32) <= equals))
        tl.store(row + tokens.to(tl.int64) * stride, tl.where(stays, x, float("-inf")), mask=tokens < vocab)
        seen += tl.sum(same.to(tl.int32))


@reference.keep_top_k_top_p.implementation("triton", supports=on_gpu)
def keep_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Overwrites logits. Nothing is sorted: a search finds the bound, reading each row at most 19 times."""
    rows, vocab = logits.shape
    if rows:
        _keep[(rows,)](
            logits, logits if top_k is None else top_k, logits if top_p is None else top_p, logits.stride(0),
            logits.stride(1), vocab, top_k is not None, top_p is not None, _BLOCK, num_warps=8,
        )  # fmt: skip
    return logits
