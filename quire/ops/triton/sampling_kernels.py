"""The kernels of sampling.py, which describes them."""

import triton
import triton.language as tl

_NONE = tl.constexpr(2147483647)  # larger than every token id


@triton.jit
def _gumbel(word):
    """Return noise from 32 random bits, as defined by the reference."""
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _first_best(value, token, best, best_token):
    """Return the larger value and its token; among equal values, the smaller token."""
    better = (value > best) | ((value == best) & (token < best_token))
    return tl.where(better, value, best), tl.where(better, token, best_token)


@triton.jit
def _first(values, tokens):
    """Return the largest value, and the smallest token that has it. If all values are NaN, the token is 0."""
    top = tl.max(values)
    token = tl.min(tl.where(values == top, tokens, _NONE))
    return top, tl.where(token == _NONE, 0, token)


@triton.jit
def _scaled(row, tokens, stride, vocab, temperature, SCALED: tl.constexpr):
    """Return the logits of the tokens, divided by the temperature like in the reference; -inf beyond the vocabulary."""
    x = tl.load(row + tokens.to(tl.int64) * stride, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    if SCALED:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
    return x


@triton.jit
def _key(x):
    """Map floats to unsigned integers of the same order. No number has the key 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return (bits ^ ((bits >> 31) & 2147483647) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _number(key):
    """The inverse of _key."""
    bits = key.to(tl.int32, bitcast=True) ^ -2147483648
    return (bits ^ ((bits >> 31) & 2147483647)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def _survey(
    logits,
    temperature,
    group_tops,
    part_sums,
    row_stride,
    stride,
    vocab,
    parts,
    SCALED: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program for each part of a row: the largest logit of each group, and the sum of exp(logit - the part's
    top)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    divisor = tl.load(temperature + row) if SCALED else 1.0
    groups: tl.constexpr = PART // GROUP
    group = tl.arange(0, groups)
    tokens = part * PART + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _scaled(logits + row * row_stride, tokens, stride, vocab, divisor, SCALED)
    tops = tl.max(x, 1)
    tl.store(group_tops + (row * parts + part) * groups + group, tops)
    weights = tl.where(x == float("-inf"), 0.0, tl.exp(x - tl.max(tops)))
    tl.store(part_sums + row * parts + part, tl.sum(tl.sum(weights, 1)))


@triton.jit(
    do_not_specialize=["min_p_stride", "top_k_stride", "top_p_stride"],
    do_not_specialize_on_alignment=["min_p", "top_k", "top_p"],
)
def _cutoff(
    group_tops,
    part_sums,
    cutoffs,
    tops,
    masses,
    min_p,
    top_k,
    top_p,
    min_p_stride,
    top_k_stride,
    top_p_stride,
    vocab,
    parts,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One program for each row. It writes the cutoff as a key (0: nothing is truncated), the largest logit, and the sum
    of exp(logit - the largest)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = (row * parts + part)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    groups = tl.load(group_tops + at, mask=(part < parts)[:, None], other=float("-inf"))
    part_tops = tl.max(groups, 1)
    top = tl.max(part_tops)
    sums = tl.load(part_sums + row * parts + part, mask=part < parts, other=0.0)
    mass = tl.sum(tl.where(part_tops == float("-inf"), 0.0, sums * tl.exp(part_tops - top)))
    share = tl.load(min_p + row * min_p_stride)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    cutoff = _key(top) * 0
    if (share > 0.0) | (k < vocab) | (p < 1.0):
        cutoff += 1
    if share > 0.0:
        cutoff = _key(top + tl.log(share))
    elif (k >= vocab) & (p < 1.0):
        # All tokens below this have less than half of the probability that top-p leaves out.
        cutoff = _key(top + tl.log(0.5 * (1.0 - p) * mass / vocab))
    if k < vocab:
        # At least k tokens reach the k-th largest of the groups' tops. Its upper 16 bits are also a bound.
        keys = _key(groups)
        found = cutoff * 0
        for bit in range(16):
            candidate = found + (tl.full([], 2147483648, tl.uint32) >> (tl.zeros([], tl.uint32) + bit))
            count = tl.sum(tl.sum((keys >= candidate).to(tl.int32), 1))
            found = tl.where(count >= k, candidate, found)
        cutoff = tl.maximum(cutoff, found)
    tl.store(cutoffs + row, cutoff.to(tl.int32, bitcast=True))
    tl.store(tops + row, top)
    tl.store(masses + row, mass)


@triton.jit(do_not_specialize_on_alignment=["temperature", "seeds", "positions"])
def _gather(
    logits,
    temperature,
    seeds,
    positions,
    cutoffs,
    best,
    best_token,
    values,
    tokens,
    row_stride,
    stride,
    vocab,
    parts,
    SCALED: tl.constexpr,
    NOISE: tl.constexpr,
    TRUNCATED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each part of a row. Without a cutoff it writes the part's best token and that token's value, with
    noise. With a cutoff it writes the candidates in token order, and their number to best_token."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = row * parts + part
    line = logits + row * row_stride
    divisor = tl.load(temperature + row) if SCALED else 1.0
    if TRUNCATED:
        cutoff = tl.load(cutoffs + row).to(tl.uint32, bitcast=True)
        if cutoff != 0:
            count = 0
            for begin in range(part * PART, tl.minimum((part + 1) * PART, vocab), BLOCK):
                token = begin + tl.arange(0, BLOCK)
                x = _scaled(line, token, stride, vocab, divisor, SCALED)
                is_candidate = (_key(x) >= cutoff) & (x > float("-inf"))
                at = index * PART + count - 1 + tl.cumsum(is_candidate.to(tl.int32), 0)
                tl.store(values + at, x, mask=is_candidate)
                tl.store(tokens + at, token, mask=is_candidate)
                count += tl.sum(is_candidate.to(tl.int32))
            tl.store(best_token + index, count)
            return
    width: tl.constexpr = 4 if NOISE else 8  # neighbouring tokens per thread; 4 share a call of Philox
    tops = tl.full([BLOCK // width, width], float("-inf"), tl.float32)
    top_tokens = tl.full([BLOCK // width, width], 2147483647, tl.int32)
    for begin in range(part * PART, tl.minimum((part + 1) * PART, vocab), BLOCK):
        group = begin // width + tl.arange(0, BLOCK // width)
        token = group[:, None] * width + tl.arange(0, width)[None, :]
        value = _scaled(line, token, stride, vocab, divisor, SCALED)
        if NOISE:
            zero = tl.zeros_like(group).to(tl.uint32)
            position = zero + tl.load(positions + row).to(tl.uint32)
            a, b, c, d = tl.philox(tl.load(seeds + row), group.to(tl.uint32), position, zero, zero)
            words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK // width, width])
            value = tl.where(value == float("-inf"), value, value + _gumbel(words))
        tops, top_tokens = _first_best(value, token, tops, top_tokens)
    top, token = _first(tops, top_tokens)
    tl.store(best + index, top)
    tl.store(best_token + index, token)


@triton.jit
def _best_of_parts(row, best, best_token, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    values = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    tokens = tl.load(best_token + row * parts + part, mask=part < parts, other=2147483647)
    _, token = _first(values, tokens)
    return token.to(tl.int64)


@triton.jit
def _merge(out, best, best_token, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, _best_of_parts(row, best, best_token, parts, PARTS))


@triton.jit
def _threshold(values, count, top, floor, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key such that, among the keys above `floor`, at least `wanted` keys are not smaller than it.

    With MASS, `wanted` is not a count but a sum of exp(number - top). The search fixes four bits in each iteration.
    """
    found = floor * 0
    for digit in range(8):
        shift = (tl.full([], 28, tl.int32) - 4 * digit).to(tl.uint32)
        candidates = found + (tl.arange(0, 16).to(tl.uint32) << shift)
        totals = tl.zeros([16], tl.float32)
        for begin in range(0, count, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(values + at, mask=at < count, other=float("-inf"))
            key = _key(x)
            counted = (at < count) & (key > floor)
            if MASS:
                weight = tl.where(counted, tl.exp(x - top), 0.0)
            else:
                weight = counted.to(tl.float32)
            totals += tl.sum(tl.where(key[:, None] >= candidates[None, :], weight[:, None], 0.0), 0)
        reached = tl.maximum(tl.sum((totals >= wanted).to(tl.int32)) - 1, 0)
        found = found + (reached.to(tl.uint32) << shift)
    return found


@triton.jit
def _above(values, count, top, key, BLOCK: tl.constexpr):
    """Return how many keys are larger than `key`, and the sum of exp(number - top) over them."""
    larger = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < count, other=float("-inf"))
        counted = (at < count) & (_key(x) > key)
        larger += counted.to(tl.float32)
        mass += tl.where(counted, tl.exp(x - top), 0.0)
    return tl.sum(larger), tl.sum(mass)


@triton.jit
def _close_ranks(values, tokens, counts, parts, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Compact a row's candidates, which the parts wrote separately, and keep their order. Returns their number.

    Every candidate moves towards the beginning, so no block overwrites data that a later block reads.
    """
    part = tl.arange(0, PARTS)
    sizes = tl.load(counts + part, mask=part < parts, other=0)
    ends = tl.cumsum(sizes, 0)
    count = tl.sum(sizes)
    for begin in range(0, count, BLOCK):
        to = begin + tl.arange(0, BLOCK)
        is_later = ends[None, :] <= to[:, None]
        at = tl.sum(is_later.to(tl.int32), 1) * PART + to - tl.sum(tl.where(is_later, sizes[None, :], 0), 1)
        x = tl.load(values + at, mask=to < count)
        token = tl.load(tokens + at, mask=to < count)
        tl.debug_barrier()  # all threads have read the candidates that are overwritten next
        tl.store(values + to, x, mask=to < count)
        tl.store(tokens + to, token, mask=to < count)
    tl.debug_barrier()  # other threads read these values next
    return count


@triton.jit(
    do_not_specialize=["min_p_stride", "top_k_stride", "top_p_stride"],
    do_not_specialize_on_alignment=["min_p", "top_k", "top_p", "seeds", "positions"],
)
def _search(
    out,
    bounds,
    seeds,
    positions,
    cutoffs,
    tops,
    masses,
    best,
    best_token,
    values,
    tokens,
    min_p,
    top_k,
    top_p,
    min_p_stride,
    top_k_stride,
    top_p_stride,
    vocab,
    parts,
    DRAW: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row. It keeps the candidates above a bound, and the first few of those equal to the bound.

    It writes the drawn token, or without DRAW, the bound and the last kept token that is equal to it.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(cutoffs + row) == 0:
        if DRAW:
            tl.store(out + row, _best_of_parts(row, best, best_token, parts, PARTS))
        else:
            tl.store(bounds + row, float("-inf"))
            tl.store(out + row, tl.zeros([], tl.int64) + vocab)
        return
    values += row * parts * PART
    tokens += row * parts * PART
    count = _close_ranks(values, tokens, best_token + row * parts, parts, PARTS, PART, 4096 // PARTS)
    top = tl.load(tops + row)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    bound = _key(top) * 0  # below every key
    equals = top * 0.0  # how many candidates equal to the bound stay
    mass_above = top * 0.0  # of the candidates above the bound
    if k < count:  # else all candidates are kept
        bound = _threshold(values, count, top, bound, k.to(tl.float32), False, BLOCK)
    if (k < count) | (p < 1.0):
        larger, mass_above = _above(values, count, top, bound, BLOCK)
        if k < count:
            equals = k.to(tl.float32) - larger
    if p < 1.0:
        mass = tl.load(masses + row)
        if (k < vocab) | (tl.load(min_p + row * min_p_stride) > 0.0):
            mass = mass_above
            if k < count:
                mass += equals * tl.exp(_number(bound) - top)
        wanted = p * mass
        weight = top * 0.0 + 1.0
        if mass_above >= wanted:  # enough even without the candidates equal to the bound
            bound = _threshold(values, count, top, bound, wanted, True, BLOCK)
            _, mass_above = _above(values, count, top, bound, BLOCK)
            weight = tl.exp(_number(bound) - top)
            equals = top * 0.0 + 16777216.0
        elif k < count:
            weight = tl.exp(_number(bound) - top)
        # Triton 3.6 would treat a constant below 2^-126 as a float64.
        missing = tl.ceil((wanted - mass_above) / tl.maximum(weight, 1.2e-38))
        equals = tl.minimum(equals, tl.maximum(missing, 1.0))
    seen = 0
    drawn = tl.full([BLOCK], float("-inf"), tl.float32)
    drawn_tokens = tl.full([BLOCK], 2147483647, tl.int32)
    last = -1
    lowest = float("inf")
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < count, other=float("-inf"))
        token = tl.load(tokens + at, mask=at < count, other=2147483647)
        key = _key(x)
        same = (key == bound) & (at < count)
        order = seen + tl.cumsum(same.to(tl.int32), 0)
        same_stays = same & (order.to(tl.float32) <= equals)
        seen += tl.sum(same.to(tl.int32))
        if DRAW:
            zero = tl.zeros_like(token).to(tl.uint32)
            position = zero + tl.load(positions + row).to(tl.uint32)
            a, b, c, d = tl.philox(tl.load(seeds + row), (token // 4).to(tl.uint32), position, zero, zero)
            which = token % 4
            word = tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))
            stays = ((key > bound) & (at < count)) | same_stays
            value = tl.where(stays, x + _gumbel(word), float("-inf"))
            drawn, drawn_tokens = _first_best(value, tl.where(stays, token, 2147483647), drawn, drawn_tokens)
        else:
            last = tl.maximum(last, tl.max(tl.where(same_stays, token, -1)))
            lowest = tl.minimum(lowest, tl.min(tl.where(at < count, x, float("inf"))))
    if DRAW:
        _, token = _first(drawn, drawn_tokens)
        tl.store(out + row, token.to(tl.int64))
    else:
        keeps_all = bound == 0
        tl.store(bounds + row, tl.where(keeps_all, lowest, _number(bound)))
        tl.store(out + row, tl.where(keeps_all, vocab, last).to(tl.int64))
