"""Paged attention: storing keys and values, attending to them, and merging partial results over parts of the keys.

A layer's cache is [blocks, kv_heads, 2 (keys, values), block_size, head_dim]. A latent cache, in which values are the
first elements of keys, is [blocks, 1, 1, block_size, head_dim]. A cache of cells consists of bytes: [blocks, kv_heads,
planes, block_size * head_dim + 4 * block_size], where each plane of cells is followed by a scale for each token. A
block also holds the entries of other layers, so block_stride is the number of elements from one block to the next.

A program computes one tile. The tile's rows are the query heads of one KV head, for a few neighbouring tokens of one
request (GQA packed into the tile, as in FlashInfer, arXiv:2501.01005). It computes an online softmax (arXiv:2205.14135)
over the request's keys, or over one of several parts of them (arXiv:2311.01282). attention_work.py plans which program
computes what, and merges the parts.
"""

import triton
import triton.language as tl

from quire.ops.triton.float8 import from_float8, to_float8
from quire.ops.triton.linear_kernels import multiplied
from quire.ops.triton.targets import wait_for_previous

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _cell(x, CELL: tl.constexpr, NATIVE: tl.constexpr):
    """Return (cells, scale) of a row of floats. CELL: 1 is int8, 2 is float8_e4m3fn."""
    largest: tl.constexpr = 127.0 if CELL == 1 else 448.0
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x)), largest), 1.1754943508222875e-38)
    scaled = tl.div_rn(x, scale + tl.zeros_like(x))
    if CELL == 1:
        shift: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
        cells = ((scaled + shift) - shift).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        cells = to_float8(scaled, NATIVE)
    return cells, scale


@triton.jit
def _scales(bytes_after_cells):
    return bytes_after_cells.to(tl.pointer_type(tl.float32))


@triton.jit
def _put(x, plane, offset, dim, inside, at, BLOCK_SIZE: tl.constexpr, CELL: tl.constexpr, NATIVE: tl.constexpr):
    """Write a token's key or value to slot `offset` of a plane of the cache."""
    if CELL == 0:
        tl.store(plane + offset * dim + at, x, mask=inside)
    else:
        cells, scale = _cell(x.to(tl.float32), CELL, NATIVE)
        tl.store(plane + offset * dim + at, cells, mask=inside)
        tl.store(_scales(plane + BLOCK_SIZE * dim) + offset, scale)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_kernel(
    cache,
    k,
    v,
    slots,
    block_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    dim,
    plane_size,
    LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CELL: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and KV head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    at = tl.arange(0, BLOCK)
    inside = at < dim
    planes: tl.constexpr = 1 if LATENT else 2
    plane = cache + slot // BLOCK_SIZE * block_stride + head * planes * plane_size
    offset = slot % BLOCK_SIZE
    key = tl.load(k + token * k_stride + head * k_head_stride + at, mask=inside, other=0.0)
    _put(key, plane, offset, dim, inside, at, BLOCK_SIZE, CELL, NATIVE)
    if not LATENT:
        value = tl.load(v + token * v_stride + head * v_head_stride + at, mask=inside, other=0.0)
        _put(value, plane + plane_size, offset, dim, inside, at, BLOCK_SIZE, CELL, NATIVE)


@triton.jit
def _times(x, scale, weight, WIDE_WEIGHT: tl.constexpr):
    """Return x * scale * weight, rounded like a norm."""
    wide = x.to(tl.float32) * scale
    if not WIDE_WEIGHT:
        wide = wide.to(x.dtype).to(tl.float32)
    return (wide * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def prepare_kernel(
    cache,
    q,
    k,
    v,
    slots,
    q_weight,
    k_weight,
    cos,
    sin,
    block_stride,
    q_stride,
    q_head_stride,
    heads,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    kv_heads,
    dim,
    half,
    plane_size,
    eps,
    NORM: tl.constexpr,
    WIDE_WEIGHT: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CELL: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr = False,
):
    """One program for each token and head. Heads of q and k are normed and rotated in place. Heads of k and v are
    stored in the cache. OVERLAPPED: see targets.overlaps_launches."""
    wait_for_previous(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    if head < heads:
        x = q + token * q_stride + head * q_head_stride
        weight = q_weight
    elif head < heads + kv_heads:
        x = k + token * k_stride + (head - heads) * k_head_stride
        weight = k_weight
    else:
        x = v + token * v_stride + (head - heads - kv_heads) * v_head_stride
        weight = k_weight
    values = tl.load(x + at, mask=inside, other=0.0)
    if head < heads + kv_heads:
        if INTERLEAVED:
            pair = at // 2
            is_second = at % 2 == 1
            partner = at ^ 1
        else:
            pair = at % half
            is_second = at >= half
            partner = tl.where(is_second, at - half, at + half)
        turned = inside & (at < 2 * half)
        other = tl.load(x + partner, mask=turned, other=0.0)
        if NORM:
            wide = values.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / dim + eps)
            values = _times(values, scale, tl.load(weight + at, mask=inside, other=0.0), WIDE_WEIGHT)
            other = _times(other, scale, tl.load(weight + partner, mask=turned, other=0.0), WIDE_WEIGHT)
        if ROTARY:
            c = tl.load(cos + token * half + pair, mask=turned, other=1.0)
            s = tl.load(sin + token * half + pair, mask=turned, other=0.0)
            across = other.to(tl.float32) * s
            rotated = values.to(tl.float32) * c + tl.where(is_second, across, -across)
            values = tl.where(turned, rotated, values.to(tl.float32)).to(values.dtype)
        tl.debug_barrier()  # all threads have read the values that are overwritten next
        tl.store(x + at, values, mask=inside)
    if head >= heads:
        slot = tl.load(slots + token)
        if slot >= 0:
            kv_head = (head - heads) % kv_heads
            which = (head - heads) // kv_heads
            plane = cache + slot // BLOCK_SIZE * block_stride + (kv_head * 2 + which) * plane_size
            _put(values, plane, slot % BLOCK_SIZE, dim, inside, at, BLOCK_SIZE, CELL, NATIVE)


@triton.jit
def _decoded(cells, dtype: tl.constexpr, CELL: tl.constexpr, NATIVE: tl.constexpr):
    """Return the values of cells, without their scales. They are exact in every type."""
    if CELL == 1:
        # 2^23 + 128 + cell has the bits of 0x4B000000 + (cell + 128). This takes fewer instructions than a conversion.
        values = ((cells ^ 0x80).to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        values = from_float8(cells, tl.float16, NATIVE).to(tl.float32)  # a direct conversion to bfloat16 is slower
    return values.to(dtype)


@triton.jit
def _each(addresses, exists, MASKED: tl.constexpr):
    """Load one element for each key, 0 for keys that do not exist."""
    if MASKED:
        loaded = tl.load(addresses, mask=exists, other=0)
    else:
        loaded = tl.load(addresses)
    return loaded


@triton.jit
def _lines(
    tokens, columns, exists, DIM: tl.constexpr, MASKED: tl.constexpr, PADDED: tl.constexpr, TURNED: tl.constexpr = False
):
    """Load the elements `columns` of the keys or values at some addresses, [keys, columns].

    TURNED: load [columns, keys] instead. Values of cells are loaded in this way, since otherwise Triton loads only 8
    bytes at once.

    MASKED: whether to load zeros for tokens that do not exist. PADDED: whether to load zeros for columns from DIM on.
    Without a mask, whole lines are loaded at once.
    """
    if TURNED:
        addresses = tokens[None, :] + columns[:, None]
        is_token = exists[None, :]
        is_column = (columns < DIM)[:, None]
    else:
        addresses = tokens[:, None] + columns[None, :]
        is_token = exists[:, None]
        is_column = (columns < DIM)[None, :]
    if MASKED and PADDED:
        lines = tl.load(addresses, mask=is_token & is_column, other=0)
    elif MASKED:
        lines = tl.load(addresses, mask=is_token, other=0)
    elif PADDED:
        lines = tl.load(addresses, mask=is_column, other=0)
    else:
        lines = tl.load(addresses)
    return lines


@triton.jit
def biases(tables, distance, reach, exists):
    """Load the biases of scores, [queries, keys]. tables: the bias table of each query's head, [2 * reach + 1] each."""
    return tl.load(tables + tl.minimum(tl.maximum(distance, -reach), reach) + reach, mask=exists, other=0.0)


@triton.jit
def _write(to, to_sums, row, is_row, values, values_rest, sums, main, rest, OUT_DIM: tl.constexpr, REST: tl.constexpr):
    """Write the results of a tile's rows. rest, values_rest: ignored if REST is False."""
    dtype: tl.constexpr = to.dtype.element_ty
    mask = is_row[:, None] & (main < OUT_DIM)[None, :]
    tl.store(to + row[:, None] * OUT_DIM + main[None, :], values.to(dtype), mask=mask)
    if REST:
        mask = is_row[:, None] & (rest < OUT_DIM)[None, :]
        tl.store(to + row[:, None] * OUT_DIM + rest[None, :], values_rest.to(dtype), mask=mask)
    tl.store(to_sums + row, sums, mask=is_row)


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["plan", "block_table", "starts", "lengths"]
)
def attend_kernel(
    out,
    lse,
    partial,
    partial_lse,
    q,
    cache,
    plan,
    block_table,
    starts,
    lengths,
    sinks,
    bias,
    block_stride,
    q_stride,
    q_head_stride,
    table_stride,
    heads,
    scale,
    soft_cap,
    window,
    reach,
    plane_size,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    OUT_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CELL: tl.constexpr,
    NATIVE: tl.constexpr,
    SINKS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_SLOT: tl.constexpr = False,
    BIASED: tl.constexpr = False,
    OVERLAPPED: tl.constexpr = False,
):
    """One program for each item of the plan and group of query heads of a KV head.

    A KV head has GROUP query heads. A program computes HEADS of them, for TOKENS tokens. The elements of a head are
    split into MAIN + REST, which are powers of two (or REST is 0): 80 is 64 + 16, and 576 is 512 + 64. The values of a
    latent cache are the first elements of MAIN. ONE_TILE: whether each request has one tile, in which all of its keys
    are masked. SPLIT: whether the keys of a tile may be divided among items, which then write to `partial`. BY_SLOT:
    whether the table lists the slot of each key instead of blocks. BIASED: whether `bias`, indexed by the distance of a
    key up to `reach`, is added to the scores. OVERLAPPED: see targets.overlaps_launches.
    """
    wait_for_previous(OVERLAPPED)
    index = tl.program_id(0)
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // parts
    part = tl.program_id(1) % parts
    item = plan + (1 + index) * 4
    request = tl.load(item)
    if request < 0:
        return
    first = tl.load(item + 1)  # counts the request's tokens in this step
    first_key = tl.load(item + 2)
    end_key = tl.load(item + 3)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    length = tl.load(lengths + request)
    cached = length - count

    rows = tl.arange(0, ROWS)
    token = first + rows // HEADS
    in_group = part * HEADS + rows % HEADS
    head = kv_head * GROUP + in_group
    is_row = (rows < TOKENS * HEADS) & (token < count) & (in_group < GROUP)
    position = cached + token
    q_rows = q + (start + token).to(tl.int64) * q_stride + head * q_head_stride
    main = tl.arange(0, MAIN)
    q_main = tl.load(q_rows[:, None] + main[None, :], mask=is_row[:, None] & (main < DIM)[None, :], other=0.0)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        q_rest = tl.load(q_rows[:, None] + rest[None, :], mask=is_row[:, None] & (rest < DIM)[None, :], other=0.0)
    dtype: tl.constexpr = q.dtype.element_ty

    # Some row of the tile sees the keys [begin, end). All rows see the keys [whole_from, whole_to).
    end = tl.minimum(cached + first + TOKENS, length)
    begin = 0
    if WINDOW:
        begin = tl.maximum(cached + first - window + 1, 0) // KEYS * KEYS
    from_key = tl.maximum(first_key, begin)
    to_key = tl.minimum(end_key, end)
    whole_from = from_key
    whole_to = from_key
    if not ONE_TILE:
        if WINDOW:
            whole_from = tl.minimum(tl.cdiv(end - window, KEYS), to_key // KEYS) * KEYS
            whole_from = tl.maximum(whole_from, from_key)
        whole_to = tl.maximum(tl.minimum(cached + first + 1, to_key) // KEYS * KEYS, whole_from)

    top = tl.full([ROWS], float("-inf"), tl.float32)  # as exponents of two
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        if first_key == 0:
            top = tl.load(sinks + head, mask=is_row, other=0.0) * LOG2_E
            total += 1.0
    values = tl.zeros([ROWS, MAIN], tl.float32)
    rest_values: tl.constexpr = REST > 0 and not LATENT
    if rest_values:
        values_rest = tl.zeros([ROWS, REST], tl.float32)
    factor = LOG2_E if SOFT_CAP or BIASED else scale * LOG2_E  # turns scores into exponents of two
    planes: tl.constexpr = 1 if LATENT else 2
    padded: tl.constexpr = MAIN > DIM
    padded_rest: tl.constexpr = MAIN + REST > DIM
    # float16 could not hold the small products of weights and scales, so values are scaled before the product.
    scaled_values: tl.constexpr = CELL > 0 and dtype == tl.float16
    table = block_table + request.to(tl.int64) * table_stride
    plane = cache + kv_head * planes * plane_size
    in_tile = tl.arange(0, KEYS)
    for phase in tl.static_range(2 if ONE_TILE else 0, 3):
        if phase > 0 or WINDOW:
            phase_from = from_key if phase == 0 else (whole_from if phase == 1 else whole_to)
            phase_to = whole_from if phase == 0 else (whole_to if phase == 1 else to_key)
            for key in range(phase_from, phase_to, KEYS):
                keys = key + in_tile
                exists = keys < to_key
                if BY_SLOT:
                    slot = _each(table + keys, exists, phase == 2)
                    block = slot // BLOCK_SIZE
                    slot = slot % BLOCK_SIZE
                else:
                    if KEYS % BLOCK_SIZE == 0:  # tiles begin where blocks begin
                        column = key // BLOCK_SIZE + in_tile // BLOCK_SIZE
                        slot = in_tile % BLOCK_SIZE
                    else:
                        column = keys // BLOCK_SIZE
                        slot = keys % BLOCK_SIZE
                    block = _each(table + column, exists, phase == 2)  # keys that do not exist are read from block 0
                entry = plane + block.to(tl.int64) * block_stride
                tokens = entry + slot * DIM
                k = _lines(tokens, main, exists, DIM, LATENT and phase == 2, padded)
                if CELL:
                    k_scales = _each(_scales(entry + BLOCK_SIZE * DIM) + slot, exists, phase == 2)
                    k = _decoded(k, dtype, CELL, NATIVE)
                scores = multiplied(q_main, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32), PRECISION)
                if REST > 0:
                    k_rest = _lines(tokens, rest, exists, DIM, False, padded_rest)
                    if CELL:
                        k_rest = _decoded(k_rest, dtype, CELL, NATIVE)
                    scores = multiplied(q_rest, tl.trans(k_rest), scores, PRECISION)
                if CELL:
                    scores *= k_scales[None, :]
                if SOFT_CAP:
                    capped = scores * (scale / soft_cap)
                    scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * capped))) * soft_cap  # tanh
                if BIASED:
                    if not SOFT_CAP:
                        scores *= scale
                    tables = bias + head[:, None] * (2 * reach + 1)
                    scores += biases(tables, keys[None, :] - position[:, None], reach, is_row[:, None])
                if phase != 1:  # some row does not see all keys
                    seen = keys[None, :] <= position[:, None]
                    if WINDOW:
                        seen = seen & (keys[None, :] > position[:, None] - window)
                    if phase == 2:
                        seen = seen & exists[None, :]
                    scores = tl.where(seen, scores, float("-inf"))
                new_top = tl.maximum(top, tl.max(scores, 1) * factor)
                base = tl.where(new_top == float("-inf"), 0.0, new_top)  # for rows that have seen no key yet
                weights = tl.exp2(scores * factor - base[:, None])
                shrink = tl.exp2(top - base)
                total = total * shrink + tl.sum(weights, 1)
                v = k
                if not LATENT:
                    tokens += plane_size
                    v = _lines(tokens, main, exists, DIM, phase == 2, padded, CELL > 0)
                if CELL:
                    if LATENT:
                        v_scales = k_scales
                    else:
                        v_scales = _each(_scales(entry + plane_size + BLOCK_SIZE * DIM) + slot, exists, phase == 2)
                        v = tl.trans(_decoded(v, dtype, CELL, NATIVE))
                    if scaled_values:
                        v = (v.to(tl.float32) * v_scales[:, None]).to(dtype)
                    else:
                        weights *= v_scales[None, :]
                weights = weights.to(dtype)
                values = multiplied(weights, v, values * shrink[:, None], PRECISION)
                if rest_values:
                    v = _lines(tokens, rest, exists, DIM, phase == 2, padded_rest, CELL > 0)
                    if CELL:
                        v = tl.trans(_decoded(v, dtype, CELL, NATIVE))
                        if scaled_values:
                            v = (v.to(tl.float32) * v_scales[:, None]).to(dtype)
                    values_rest = multiplied(weights, v, values_rest * shrink[:, None], PRECISION)
                top = new_top

    shares = 1.0 / tl.where(total > 0, total, 1.0)
    log_sum = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    values = values * shares[:, None]
    others = values
    columns = main
    if REST > 0:
        columns = rest
    if rest_values:
        others = values_rest * shares[:, None]
    is_partial = False
    if SPLIT:
        is_partial = index < tl.load(plan)
        if is_partial:
            row = (index * TOKENS + token - first).to(tl.int64) * heads + head
            _write(partial, partial_lse, row, is_row, values, others, log_sum, main, columns, OUT_DIM, rest_values)
    if not is_partial:
        row = (start + token).to(tl.int64) * heads + head
        _write(out, lse, row, is_row, values, others, log_sum * LN_2, main, columns, OUT_DIM, rest_values)
