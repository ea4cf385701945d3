"""The kernels of state_chunks.py, which describes them."""

import triton
import triton.language as tl

from quire.ops.triton.linear_kernels import multiplied
from quire.ops.triton.states import of_span, resume, store_state


@triton.jit
def _number(position, block_size, CHUNK: tl.constexpr):
    """Return the number of the chunk that contains a position of a text."""
    return position // block_size * tl.cdiv(block_size, CHUNK) + position % block_size // CHUNK


@triton.jit
def _slots(tokens, requests, block_size, CHUNK: tl.constexpr):
    """Return an upper bound of the number of chunks for these numbers of tokens and requests."""
    return tokens // CHUNK + tokens // block_size + 4 * requests


@triton.jit
def _decays(decay, at, element, valid, KEY_DIM: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Load the decays of tokens, [tokens, KEYS or 1], with 1 for those that are not valid. at: the places of the head's
    decays, [tokens]"""
    if BY_CHANNEL:
        inside = valid[:, None] & (element < KEY_DIM)[None, :]
        decays = tl.load(decay + at[:, None] * KEY_DIM + element[None, :], mask=inside, other=1.0)
    else:
        decays = tl.load(decay + at, mask=valid, other=1.0)[:, None]
    return decays


@triton.jit
def _products(decays, SIZE: tl.constexpr, REVERSE: tl.constexpr):
    """Return the products of decays, [tokens, KEYS or 1], from the first of each SIZE tokens on, or from the last one
    back."""
    ROWS: tl.constexpr = decays.shape[0]
    KEYS: tl.constexpr = decays.shape[1]
    if SIZE == 1:
        products = decays
    elif SIZE == ROWS:
        products = tl.cumprod(decays, 0, reverse=REVERSE)
    else:
        apart = tl.cumprod(tl.reshape(decays, [ROWS // SIZE, SIZE, KEYS]), 1, reverse=REVERSE)
        products = tl.reshape(apart, [ROWS, KEYS])
    return products


@triton.jit
def _from_first(decays, i, SIZE: tl.constexpr):
    """Return the products of the decays before a token, within each SIZE tokens. decays: those of the previous
    tokens."""
    return _products(tl.where((i % SIZE == 0)[:, None], 1.0, decays), SIZE, False)


@triton.jit
def _to_last(decays, i, SIZE: tl.constexpr):
    """Return the products of the decays after a token, within each SIZE tokens. decays: those of the following
    tokens."""
    return _products(tl.where((i % SIZE == SIZE - 1)[:, None], 1.0, decays), SIZE, True)


@triton.jit
def _pairs(x, y, wanted, PRECISION: tl.constexpr):
    """Return x y^T where it is wanted, 0 elsewhere: [tokens, tokens]"""
    products = multiplied(x, tl.trans(y), tl.zeros([x.shape[0], x.shape[0]], tl.float32), PRECISION)
    return tl.where(wanted, products, 0.0)


@triton.jit
def _inverse(lower, i, SIZE: tl.constexpr):
    """Return (1 + lower)^-1 by substitution, row by row, for a matrix with zeros on and above its diagonal."""
    found = -lower
    for row in range(1, SIZE):
        is_row = (i == row)[:, None]
        known = tl.sum(tl.where(is_row, found, 0.0), 0)
        known += tl.sum(known[:, None] * found, 0)
        found = tl.where(is_row, known[None, :], found)
    return found + tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit(do_not_specialize=["requests", "block_size", "drafts"])
def _prepare(
    mixed,
    keys,
    values,
    decayed,
    q,
    k,
    v,
    decay,
    scale,
    starts,
    lengths,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    scale_stride,
    requests,
    heads,
    ratio,
    value_dim,
    block_size,
    drafts,
    SHORT: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PART: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    REMOVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """mixed: [tokens, heads, CHUNK], the factors of the chunk's changes in a token's result; with REMOVAL, the same
    amount again for values. A change is a row of values: [tokens, heads, value_dim] minus a row of keys: [tokens,
    heads, KEY_DIM] times the state before the chunk. decayed: used with BY_CHANNEL, [tokens, heads, 3 or 4, KEY_DIM].
    It contains the query and the write key, with their decays in the chunk; the decays of the whole chunk, only for its
    first token; and with REMOVAL the key of the values. PART: elements of keys and values that are processed at a time.
    LEVELS: CHUNK is 2^LEVELS."""
    PARTS: tl.constexpr = 2 * CHUNK if REMOVAL else CHUNK
    KINDS: tl.constexpr = 4 if REMOVAL else 3
    slot = tl.program_id(0)
    head = tl.program_id(1)
    low = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if _slots(tl.load(starts + middle), middle, block_size, CHUNK) <= slot:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    first, start, end, certain = of_span(starts, lengths, request, drafts)
    number = slot - _slots(tl.load(starts + request), request, block_size, CHUNK) + _number(start, block_size, CHUNK)
    is_first_part = number <= _number(certain - 1, block_size, CHUNK)
    skipped = _number(certain, block_size, CHUNK) - _number(certain - 1, block_size, CHUNK) - 1
    number = tl.where(is_first_part, number, number + skipped)
    chunks = tl.cdiv(block_size, CHUNK)
    i = tl.arange(0, CHUNK)
    begin = number // chunks * block_size + number % chunks * CHUNK
    low = tl.maximum(begin, tl.where(is_first_part, start, certain))
    high = tl.minimum(tl.where(is_first_part, certain, end), (number // chunks + 1) * block_size)
    high = tl.minimum(high, begin + CHUNK)
    if (end - start > SHORT) & (low < high):
        position = begin + i
        group = head // ratio
        valid = (position >= low) & (position < high)
        at = first + position - start
        is_before = valid & (position > low)
        is_behind = valid & (position < high - 1)
        of_head = at * heads + head
        same = i[:, None] == i[None, :]
        below = i[:, None] > i[None, :]
        bits = tl.where(below, i[:, None] ^ i[None, :], 0)  # the highest bit is the level of a pair
        queries = q + at[:, None] * q_stride + group * q_head
        all_keys = k + at[:, None] * k_stride + group * k_head
        removing = scale + at[:, None] * scale_stride + head * 2 * KEY_DIM
        change = tl.zeros([CHUNK, CHUNK], tl.float32)
        found = tl.zeros([CHUNK, CHUNK], tl.float32)
        added = change
        read = found
        for part in range(0, KEY_DIM, PART):
            element = part + tl.arange(0, PART)
            inside = valid[:, None] & (element < KEY_DIM)[None, :]
            column = element[None, :]
            query = tl.load(queries + column, mask=inside, other=0.0).to(tl.float32)
            key = tl.load(all_keys + column, mask=inside, other=0.0).to(tl.float32)
            if BY_CHANNEL:
                reading = key
                writing = key
                if REMOVAL:
                    reading = tl.load(removing + column, mask=inside, other=0.0)
                    writing = tl.load(removing + KEY_DIM + column, mask=inside, other=0.0)
                    before = _decays(decay, of_head - heads, element, is_before, KEY_DIM, True)
                    added += tl.where(same, tl.sum(query * key, 1)[:, None], 0.0)
                decays = _decays(decay, of_head, element, valid, KEY_DIM, True)
                behind = _decays(decay, of_head + heads, element, is_behind, KEY_DIM, True)
                change += tl.where(same, tl.sum(query * writing, 1)[:, None], 0.0)
                for level in tl.static_range(LEVELS):
                    pairs = bits >> (LEVELS - 1 - level) == 1
                    into = _products(decays, CHUNK >> (level + 1), False)
                    rest = _to_last(behind, i, CHUNK >> (level + 1))
                    change += _pairs(query * into, writing * rest, pairs, PRECISION)
                    if REMOVAL:
                        added += _pairs(query * into, key * rest, pairs, PRECISION)
                        into = _from_first(before, i, CHUNK >> (level + 1))
                        read += _pairs(reading * into, key * rest, pairs, PRECISION)
                    found += _pairs(reading * into, writing * rest, pairs, PRECISION)
            else:
                change = multiplied(query, tl.trans(key), change, PRECISION)
                if DELTA:
                    found = multiplied(key, tl.trans(key), found, PRECISION)
        if not BY_CHANNEL:
            apart = tl.cumprod(tl.where(below, _decays(decay, of_head, i, valid, KEY_DIM, False), 1.0), 0)
            change *= tl.where(below | same, apart, 0.0)
            found *= tl.where(below, apart, 0.0)
        factors = mixed + (of_head * PARTS)[:, None] + i[None, :]
        tl.store(factors, change, mask=valid[:, None])
        if REMOVAL:
            tl.store(factors + CHUNK, added, mask=valid[:, None])
        if DELTA or REMOVAL:
            if DELTA:
                rate = tl.load(scale + at * scale_stride + head, mask=valid, other=0.0).to(tl.float32)
                found *= rate[:, None]
            solved = _inverse(found, i, CHUNK)
            if DELTA:
                solved *= rate[None, :]
        if DELTA or BY_CHANNEL:
            for part in range(0, KEY_DIM, PART):
                element = part + tl.arange(0, PART)
                inside = valid[:, None] & (element < KEY_DIM)[None, :]
                column = element[None, :]
                key = tl.load(all_keys + column, mask=inside, other=0.0).to(tl.float32)
                into = _products(_decays(decay, of_head, element, valid, KEY_DIM, BY_CHANNEL), CHUNK, False)
                reading = key
                into_reading = into
                if BY_CHANNEL:
                    query = tl.load(queries + column, mask=inside, other=0.0).to(tl.float32)
                    rest = _to_last(_decays(decay, of_head + heads, element, is_behind, KEY_DIM, True), i, CHUNK)
                    places = decayed + (of_head * (KINDS * KEY_DIM))[:, None] + column
                    tl.store(places, query * into, mask=inside)
                    writing = key
                    if REMOVAL:
                        writing = tl.load(removing + KEY_DIM + column, mask=inside, other=0.0)
                        tl.store(places + 3 * KEY_DIM, key * rest, mask=inside)
                        reading = tl.load(removing + column, mask=inside, other=0.0)
                        before = _decays(decay, of_head - heads, element, is_before, KEY_DIM, True)
                        into_reading = _from_first(before, i, CHUNK)
                    tl.store(places + KEY_DIM, writing * rest, mask=inside)
                    tl.store(places + 2 * KEY_DIM, into * rest, mask=inside & (position == low)[:, None])
                if DELTA or REMOVAL:
                    made = tl.zeros([CHUNK, PART], tl.float32)
                    made = multiplied(solved, reading * into_reading, made, PRECISION)
                    tl.store(keys + of_head[:, None] * KEY_DIM + column, made, mask=inside)
        if DELTA or REMOVAL:
            if REMOVAL:
                solved = -multiplied(solved, read, tl.zeros([CHUNK, CHUNK], tl.float32), PRECISION)
            for part in range(0, value_dim, PART):
                column = part + tl.arange(0, PART)
                mask = valid[:, None] & (column < value_dim)[None, :]
                value = tl.load(v + at[:, None] * v_stride + head * value_dim + column[None, :], mask=mask, other=0.0)
                made = multiplied(solved, value.to(tl.float32), tl.zeros([CHUNK, PART], tl.float32), PRECISION)
                tl.store(values + of_head[:, None] * value_dim + column[None, :], made, mask=mask)


@triton.jit(do_not_specialize=["block_size", "drafts"])
def _scan_chunks(
    out,
    mixed,
    keys,
    values,
    decayed,
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
    SHORT: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    REMOVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program advances COLUMNS columns of one head's state through the chunks of a span."""
    PARTS: tl.constexpr = 2 * CHUNK if REMOVAL else CHUNK
    KINDS: tl.constexpr = 4 if REMOVAL else 3
    request = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    element = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known = element < KEY_DIM
    exists = column < value_dim
    first, start, end, certain = of_span(starts, lengths, request, drafts)
    if end - start > SHORT:
        table += request * table_stride
        group = head // ratio
        stored = known[:, None] & exists[None, :]
        place = (head * KEY_DIM + element)[:, None] * value_dim + column[None, :]
        matrix = resume(
            state,
            behind,
            number,
            table,
            start,
            place,
            stored,
            element,
            column,
            head,
            0.0,
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
            False,
            REMOVAL,
        )
        low = start
        while low < end:
            high = tl.minimum(end, (low // block_size + 1) * block_size)
            high = tl.minimum(high, tl.where(low < certain, certain, end))
            for begin in range(low - low % block_size % CHUNK, high, CHUNK):
                valid = (begin + i >= low) & (begin + i < high)
                at = first + begin - start + i
                of_head = at * heads + head
                inside = valid[:, None] & known[None, :]
                if BY_CHANNEL:
                    places = decayed + (of_head * (KINDS * KEY_DIM))[:, None] + element[None, :]
                    query = tl.load(places, mask=inside, other=0.0)
                    key = tl.load(places + KEY_DIM, mask=inside, other=0.0)
                    token_of_all = first + tl.maximum(begin, low) - start
                    all_decays = decayed + ((token_of_all * heads + head) * KINDS + 2) * KEY_DIM
                    all_decays = tl.load(all_decays + element, mask=known, other=1.0)[:, None]
                else:
                    query = q + at[:, None] * q_stride + group * q_head + element[None, :]
                    key = k + at[:, None] * k_stride + group * k_head + element[None, :]
                    into = _products(_decays(decay, of_head, element, valid, KEY_DIM, False), CHUNK, False)
                    rest = _decays(decay, of_head + heads, element, valid & (begin + i < high - 1), KEY_DIM, False)
                    query = tl.load(query, mask=inside, other=0.0).to(tl.float32) * into
                    key = tl.load(key, mask=inside, other=0.0).to(tl.float32) * _to_last(rest, i, CHUNK)
                    all_decays = tl.sum(tl.where((i == CHUNK - 1)[:, None], into, 0.0), 0)[:, None]
                mask = valid[:, None] & exists[None, :]
                if HAS_SKIP or not DELTA:
                    value = v + at[:, None] * v_stride + head * value_dim + column[None, :]
                    value = tl.load(value, mask=mask, other=0.0).to(tl.float32)
                if DELTA or REMOVAL:
                    change = tl.load(values + of_head[:, None] * value_dim + column[None, :], mask=mask, other=0.0)
                    made = tl.load(keys + of_head[:, None] * KEY_DIM + element[None, :], mask=inside, other=0.0)
                    change -= multiplied(made, matrix, tl.zeros([CHUNK, COLUMNS], tl.float32), PRECISION)
                else:
                    rate = tl.load(scale + at * scale_stride + head, mask=valid, other=0.0).to(tl.float32)
                    change = rate[:, None] * value
                found = multiplied(query, matrix, tl.zeros([CHUNK, COLUMNS], tl.float32), PRECISION)
                factors = mixed + (of_head * PARTS)[:, None] + i[None, :]
                found = multiplied(tl.load(factors, mask=valid[:, None], other=0.0), change, found, PRECISION)
                if HAS_SKIP:
                    found += tl.load(skip + head) * value
                matrix = multiplied(tl.trans(key), change, matrix * all_decays, PRECISION)
                if REMOVAL:
                    factors = tl.load(factors + CHUNK, mask=valid[:, None], other=0.0)
                    found = multiplied(factors, value, found, PRECISION)
                    key = tl.load(places + 3 * KEY_DIM, mask=inside, other=0.0)
                    matrix = multiplied(tl.trans(key), value, matrix, PRECISION)
                tl.store(out + of_head[:, None] * value_dim + column[None, :], found, mask=mask)
            store_state(state, table, matrix, place, stored, high, end, certain, page, block_size)
            low = high
