"""Recurrent layers (ops/reference/states.py defines them), which process the tokens of a text one after the other.

A program computes some channels of one request, or some columns of one head's state, which are independent of each
other, for all tokens of the step. So a launch depends only on the number of requests, and results do not depend on how
a text is divided into steps. state_chunks.py has a faster scan of long spans, whose results depend on it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import states as reference
from quire.ops.reference.states import Pages, StatePlan
from quire.ops.triton.targets import on_gpu

_COLUMNS = 32  # columns of a head's state per program
_ALL = 2**30  # more tokens than any span has


@triton.jit
def of_span(starts, lengths, request, drafts):
    """Return the first token in the flat batch, the positions of the first token and after the last, and the certain
    length."""
    first = tl.load(starts + request)
    end = tl.load(lengths + request)
    start = end - (tl.load(starts + request + 1) - first)
    return first.to(tl.int64), start, end, tl.maximum(start + 1, end - drafts)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _advance(state, key, value, rates, factor, writing, DELTA: tl.constexpr, REMOVAL: tl.constexpr):
    if REMOVAL:  # factor: the key that reads
        found = tl.sum(state * factor[:, None], 0)
        state = state * rates + key[:, None] * value[None, :] - writing[:, None] * found[None, :]
    else:
        state = state * rates
        if DELTA:
            value = value - tl.sum(state * key[:, None], 0)
        state = state + key[:, None] * (factor * value)[None, :]
    return state


@triton.jit
def resume(
    state,
    behind,
    number,
    table,
    start,
    place,
    inside,
    i,
    column,
    head,
    speed,
    page,
    heads,
    ratio,
    token,
    value_dim,
    block_size,
    drafts,
    KEY_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    SELECTIVE: tl.constexpr,
    REMOVAL: tl.constexpr,
):
    """Return the state before a span: the page's state, advanced through the tokens that were computed earlier but were
    not certain then. place: [keys, columns], the elements' places in a page's states; inside: which of these elements
    exist. speed: the rates of decays in a selective scan."""
    known = i < KEY_DIM
    exists = column < value_dim
    source = tl.load(table + tl.maximum(start - 1, 0) // block_size, mask=start > 0, other=0).to(tl.int64)
    matrix = tl.load(state + source * page + place, mask=inside & (place * 0 + start > 0), other=0.0)
    at_v = heads // ratio * KEY_DIM
    per_head = KEY_DIM if BY_CHANNEL else 1
    at_decay = at_v + heads * value_dim
    at_scale = at_decay + (0 if SELECTIVE else heads * per_head)
    group = head // ratio
    of_scale = column if SELECTIVE else column * 0 + head
    scaled = exists
    if REMOVAL:
        of_scale = head * 2 * KEY_DIM + i
        scaled = known
    for position in range(tl.load(number + source * page, mask=start > 0, other=start), start):
        row = behind + source * page + (position % drafts) * token
        key = tl.load(row + group * KEY_DIM + i, mask=known, other=0.0)
        value = tl.load(row + at_v + head * value_dim + column, mask=exists, other=0.0)
        factor = tl.load(row + at_scale + of_scale, mask=scaled, other=0.0)
        writing = factor
        if REMOVAL:
            writing = tl.load(row + at_scale + of_scale + KEY_DIM, mask=scaled, other=0.0)
        if SELECTIVE:
            rates = tl.exp(-speed * factor[None, :])
        else:
            of_head = row + at_decay + head * per_head
            rates = tl.load(of_head + (i if BY_CHANNEL else i * 0), mask=known, other=0.0)[:, None]
        matrix = _advance(matrix, key, value, rates, factor, writing, DELTA, REMOVAL)
    return matrix


@triton.jit
def store_state(state, table, matrix, place, inside, number, end, certain, page, block_size):
    """Store the state after `number` tokens in all pages that need this state, see Span.pages."""
    for block_index in range((number - 1) // block_size, tl.cdiv(end, block_size)):
        reached = tl.minimum((block_index + 1) * block_size, certain)
        block = tl.load(table + block_index).to(tl.int64)
        stored = inside & (place * 0 + block > 0) & (place * 0 + reached == number)
        tl.store(state + block * page + place, matrix, mask=stored)


@triton.jit(do_not_specialize=["block_size", "drafts", "most"])
def _scan(
    out,
    q,
    k,
    v,
    decay,
    scale,
    skip,
    state,
    behind,
    number,
    starts,
    lengths,
    table,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    scale_stride,
    page,
    table_stride,
    heads,
    ratio,
    token,
    value_dim,
    block_size,
    drafts,
    most,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    SELECTIVE: tl.constexpr,
    REMOVAL: tl.constexpr,
):
    """most: the maximum number of tokens of the spans computed here. KEYS: KEY_DIM with padding. BY_CHANNEL: whether
    each element of a key has its own decay. SELECTIVE: decay has a rate for each element of the state, and scale and
    skip have an element for each of its columns. REMOVAL: scale has the keys that read and write the removed values."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known = i < KEY_DIM
    exists = column < value_dim
    inside = known[:, None] & exists[None, :]
    first, start, end, certain = of_span(starts, lengths, request, drafts)
    is_short = end - start <= most
    start = tl.where(is_short, start, 0)
    end = tl.where(is_short, end, 0)
    table += request * table_stride
    place = (head * KEY_DIM + i)[:, None] * value_dim + column[None, :]
    group = head // ratio
    per_head = KEY_DIM if BY_CHANNEL else 1
    of_scale = column if SELECTIVE else column * 0 + head
    scaled = exists
    if REMOVAL:
        of_scale = head * 2 * KEY_DIM + i
        scaled = known
    speed = tl.load(decay + place, mask=inside, other=0.0) if SELECTIVE else 0.0
    matrix = resume(
        state,
        behind,
        number,
        table,
        start,
        place,
        inside,
        i,
        column,
        head,
        speed,
        page,
        heads,
        ratio,
        token,
        value_dim,
        block_size,
        drafts,
        KEY_DIM,
        BY_CHANNEL,
        DELTA,
        SELECTIVE,
        REMOVAL,
    )
    for position in range(start, end):
        index = first + position - start
        key = tl.load(k + index * k_stride + group * k_head + i, mask=known, other=0.0).to(tl.float32)
        query = tl.load(q + index * q_stride + group * q_head + i, mask=known, other=0.0).to(tl.float32)
        value = tl.load(v + index * v_stride + head * value_dim + column, mask=exists, other=0.0).to(tl.float32)
        factor = tl.load(scale + index * scale_stride + of_scale, mask=scaled, other=0.0).to(tl.float32)
        writing = factor
        if REMOVAL:
            writing = tl.load(scale + index * scale_stride + of_scale + KEY_DIM, mask=scaled, other=0.0)
        if SELECTIVE:
            rates = tl.exp(-speed * factor[None, :])
        else:
            of_head = decay + (index * heads + head) * per_head
            rates = tl.load(of_head + (i if BY_CHANNEL else i * 0), mask=known, other=0.0)[:, None]
        matrix = _advance(matrix, key, value, rates, factor, writing, DELTA, REMOVAL)
        found = tl.sum(matrix * query[:, None], 0)
        if HAS_SKIP:
            found += tl.load(skip + of_scale, mask=exists, other=0.0) * value
        tl.store(out + (index * heads + head) * value_dim + column, found, mask=exists)
        if ((position + 1) % block_size == 0) | (position + 1 == certain):
            store_state(state, table, matrix, place, inside, position + 1, end, certain, page, block_size)


@triton.jit(do_not_specialize=["block_size", "drafts"])
def _keep(
    behind,
    number,
    k,
    v,
    decay,
    scale,
    starts,
    lengths,
    table,
    k_stride,
    k_head,
    v_stride,
    scale_stride,
    page,
    table_stride,
    key_dim,
    at_v,
    at_decay,
    at_scale,
    token,
    heads,
    block_size,
    drafts,
    SIZE: tl.constexpr,
):
    """After all programs of _scan have ended, store the tokens after the pages' states, and the lengths of these
    states."""
    request = tl.program_id(0)
    e = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    first, start, end, certain = of_span(starts, lengths, request, drafts)
    is_k = e < at_v
    is_v = (e >= at_v) & (e < at_decay)
    is_decay = (e >= at_decay) & (e < at_scale)
    is_scale = (e >= at_scale) & (e < token)
    for block_index in range(start // block_size, tl.cdiv(end, block_size)):
        block = tl.load(table + request * table_stride + block_index).to(tl.int64)
        reached = tl.minimum((block_index + 1) * block_size, certain)
        if tl.program_id(1) == 0:
            tl.store(number + block * page, reached, mask=block > 0)
        for position in range(reached, tl.minimum(reached + drafts, end)):
            index = first + position - start
            of_k = tl.load(k + index * k_stride + e // key_dim * k_head + e % key_dim, mask=is_k, other=0.0)
            of_v = tl.load(v + index * v_stride + e - at_v, mask=is_v, other=0.0)
            of_decay = tl.load(decay + index * (at_scale - at_decay) + e - at_decay, mask=is_decay, other=0.0)
            of_scale = tl.load(scale + index * scale_stride + e - at_scale, mask=is_scale, other=0.0)
            row = of_k.to(tl.float32) + of_v.to(tl.float32) + of_decay + of_scale.to(tl.float32)
            tl.store(
                behind + block * page + (position % drafts) * token + e, row, mask=(e < token) & (e * 0 + block > 0)
            )


@reference.scan.implementation("triton", supports=on_gpu)
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: Tensor,
    skip: Tensor | None,
    pages: Pages,
    plan: StatePlan,
    rule: str,
) -> Tensor:
    out = v.new_empty(v.shape)
    scan_spans(out, q, k, v, decay, scale, skip, pages, plan, rule)
    return out


@reference.selective_scan.implementation("triton", supports=on_gpu)
def selective_scan(
    q: Tensor, k: Tensor, v: Tensor, steps: Tensor, rate: Tensor, skip: Tensor, pages: Pages, plan: StatePlan
) -> Tensor:
    out = v.new_empty(v.shape)
    scan_spans(out[:, None], q[:, None], k[:, None], v[:, None], rate, steps, skip, pages, plan, "selective")
    return out


def scan_spans(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: Tensor,
    skip: Tensor | None,
    pages: Pages,
    plan: StatePlan,
    rule: str,
    most: int = _ALL,
) -> None:
    """Scan the spans of up to `most` tokens, then store the other parts of all spans' pages."""
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    # The numbers of each head, see StateShape.
    decays, scales = (0, value_dim) if rule == "selective" else (part.shape[1] // heads for part in (decay, scale))
    requests = len(plan.lengths)
    page = pages.state.stride(0)
    at_v = key_heads * key_dim
    at_decay = at_v + heads * value_dim
    at_scale = at_decay + heads * decays
    token = at_scale + heads * scales
    _scan[requests, heads, triton.cdiv(value_dim, _COLUMNS)](
        out,
        q,
        k,
        v,
        decay,
        scale,
        skip,
        pages.state,
        pages.behind,
        pages.number,
        plan.starts,
        plan.lengths,
        plan.table,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        scale.stride(0),
        page,
        plan.table.stride(0),
        heads,
        heads // key_heads,
        token,
        value_dim,
        plan.block_size,
        plan.drafts,
        most,
        key_dim,
        triton.next_power_of_2(key_dim),
        _COLUMNS,
        decays > 1,
        rule == "delta",
        skip is not None,
        rule == "selective",
        rule == "removal",
    )
    _keep[requests, triton.cdiv(token, 256) if plan.drafts else 1](
        pages.behind,
        pages.number,
        k,
        v,
        decay,
        scale,
        plan.starts,
        plan.lengths,
        plan.table,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        scale.stride(0),
        page,
        plan.table.stride(0),
        key_dim,
        at_v,
        at_decay,
        at_scale,
        token,
        heads,
        plan.block_size,
        plan.drafts,
        256,
    )


@triton.jit
def _gated_norm(
    out,
    x,
    gate,
    weight,
    x_stride,
    gate_stride,
    n,
    size,
    eps,
    SIZE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    column = tl.program_id(1) * size + i
    exists = i < size
    y = tl.load(x + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=exists, other=0.0).to(tl.float32)
    factor = _sigmoid(g) * (g if SILU else 1.0)
    if GATE_FIRST:
        y = y * factor
    if HAS_WEIGHT:
        y = y * tl.rsqrt(tl.sum(tl.where(exists, y * y, 0.0)) / size + eps)
        w = tl.load(weight + column, mask=exists, other=0.0)
        y = (w.to(tl.float32) * y.to(w.dtype).to(tl.float32)).to(w.dtype).to(tl.float32)
    if not GATE_FIRST:
        y = y * factor
    tl.store(out + row * n + column, y, mask=exists)


@reference.gated_norm.implementation("triton", supports=on_gpu)
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, size: int, gate_first: bool, activation: str
) -> Tensor:
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        _gated_norm[rows, n // size](
            out,
            x,
            gate,
            weight,
            x.stride(0),
            gate.stride(0),
            n,
            size,
            eps,
            triton.next_power_of_2(size),
            weight is not None,
            gate_first,
            activation == "silu",
        )
    return out
