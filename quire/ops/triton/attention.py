"""Paged attention: storing keys and values, attending to them, and merging partial results over parts of the keys.

A layer's cache is [blocks, kv_heads, 2 (keys, values), block_size, head_dim]. A latent cache, in which values are the
first elements of keys, is [blocks, 1, 1, block_size, head_dim]. A cache of cells has bytes: [blocks, kv_heads, planes,
block_size * head_dim + 4 * block_size], where each plane of cells is followed by a scale for each token. A block also
holds the entries of other layers, so block_stride is the number of elements from one block to the next.

A program attends for one tile. Its rows are the query heads of one KV head, for a few neighbouring tokens of one
request (GQA packed into the tile, as in FlashInfer, arXiv:2501.01005). It computes an online softmax (arXiv:2205.14135)
over the request's keys, or over one of several parts of them (arXiv:2311.01282). The kernel finds the request of a tile
itself, so a launch depends only on the numbers of tokens and requests, as CUDA graphs require.
"""

import triton
import triton.language as tl

from quire.ops.triton.linear import multiplied, part_of

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _cell(x, CELL: tl.constexpr):
    """(cells, scale) of a row of floats. CELL: 1 is int8, 2 is float8_e4m3fn."""
    largest: tl.constexpr = 127.0 if CELL == 1 else 448.0
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x)), largest), 1.1754943508222875e-38)
    scaled = tl.div_rn(x, scale + tl.zeros_like(x))
    if CELL == 1:
        shift: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
        return ((scaled + shift) - shift).to(tl.int8).to(tl.uint8, bitcast=True), scale
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale


@triton.jit
def _scales(bytes_after_cells):
    return bytes_after_cells.to(tl.pointer_type(tl.float32))


@triton.jit
def _put(x, plane, offset, dim, inside, at, BLOCK_SIZE: tl.constexpr, CELL: tl.constexpr):
    """Write a token's key or value to slot `offset` of a plane of the cache."""
    if CELL == 0:
        tl.store(plane + offset * dim + at, x, mask=inside)
    else:
        cells, scale = _cell(x.to(tl.float32), CELL)
        tl.store(plane + offset * dim + at, cells, mask=inside)
        tl.store(_scales(plane + BLOCK_SIZE * dim) + offset, scale)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_kernel(
    cache, k, v, slots, block_stride, k_stride, k_head_stride, v_stride, v_head_stride, dim, plane_size,
    LATENT: tl.constexpr, BLOCK_SIZE: tl.constexpr, CELL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each token and KV head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    at = tl.arange(0, BLOCK)
    inside = at < dim
    planes: tl.constexpr = 1 if LATENT else 2
    plane = cache + slot // BLOCK_SIZE * block_stride + head * planes * plane_size
    offset = slot % BLOCK_SIZE
    key = tl.load(k + token * k_stride + head * k_head_stride + at, mask=inside, other=0.0)
    _put(key, plane, offset, dim, inside, at, BLOCK_SIZE, CELL)
    if not LATENT:
        value = tl.load(v + token * v_stride + head * v_head_stride + at, mask=inside, other=0.0)
        _put(value, plane + plane_size, offset, dim, inside, at, BLOCK_SIZE, CELL)


@triton.jit
def _times(x, scale, weight, WIDE_WEIGHT: tl.constexpr):
    """x * scale * weight, rounded like a norm"""
    wide = x.to(tl.float32) * scale
    if not WIDE_WEIGHT:
        wide = wide.to(x.dtype).to(tl.float32)
    return (wide * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def prepare_kernel(
    cache, q, k, v, slots, q_weight, k_weight, cos, sin, block_stride, q_stride, q_head_stride, heads, k_stride,
    k_head_stride, v_stride, v_head_stride, kv_heads, dim, half, plane_size, eps,
    NORM: tl.constexpr, WIDE_WEIGHT: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CELL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each token and head. Heads of q and k are normed and rotated in place. Heads of k and v are stored
    in the cache."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
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
            pair, is_second, partner = at // 2, at % 2 == 1, at ^ 1
        else:
            pair, is_second = at % half, at >= half
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
            _put(values, plane, slot % BLOCK_SIZE, dim, inside, at, BLOCK_SIZE, CELL)


@triton.jit
def _decoded(cells, scales, dtype: tl.constexpr, CELL: tl.constexpr):
    if CELL == 1:
        wide = cells.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        wide = cells.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return (wide * scales).to(dtype)


@triton.jit
def _lines(at, columns, exists, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr):
    """The elements `columns` of the keys or values at addresses `at`: [keys, columns], or [columns, keys] if TURNED.

    If all of them exist, nothing is masked, so that whole lines are loaded at once.
    """
    if TURNED:
        addresses = at[None, :] + columns[:, None]
        inside = exists[None, :] & (columns < DIM)[:, None]
    else:
        addresses = at[:, None] + columns[None, :]
        inside = exists[:, None] & (columns < DIM)[None, :]
    if MASKED or BLOCK > DIM:
        return tl.load(addresses, mask=inside, other=0)
    else:
        return tl.load(addresses)


@triton.jit(do_not_specialize=["requests", "splits"], do_not_specialize_on_alignment=["block_table"])
def attend_kernel(
    out, lse, partial, partial_lse, q, cache, block_table, starts, lengths, sinks, block_stride, q_stride,
    q_head_stride, table_stride, requests, splits, kv_heads, scale, soft_cap, window, plane_size,
    GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, OUT_DIM: tl.constexpr,
    OUT_BLOCK: tl.constexpr, LATENT: tl.constexpr, BLOCK_SIZE: tl.constexpr, CELL: tl.constexpr, SINKS: tl.constexpr,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program for each tile, KV head and part of the keys. The elements of a head are split into MAIN + REST,
    which are powers of two (or REST is 0): 80 is 64 + 16, and 576 is 512 + 64."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = part_of(starts, tile, requests, TOKENS)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    first = (tile - start // TOKENS - request) * TOKENS  # counts the request's tokens in this step
    if first >= count:
        return
    length = tl.load(lengths + request)
    cached = length - count

    rows = tl.arange(0, ROWS)
    token, head = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (rows < TOKENS * GROUP) & (token < count)
    position = cached + token
    q_rows = q + (start + token).to(tl.int64) * q_stride + head * q_head_stride
    main = tl.arange(0, MAIN)
    q_main = tl.load(q_rows[:, None] + main[None, :], mask=is_row[:, None] & (main < DIM)[None, :], other=0.0)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        q_rest = tl.load(q_rows[:, None] + rest[None, :], mask=is_row[:, None] & (rest < DIM)[None, :], other=0.0)
    dtype = q_main.dtype

    # Some row of the tile sees the keys [begin, end). All rows see the keys before `whole`.
    end = tl.minimum(cached + first + TOKENS, length)
    begin = 0
    if WINDOW:
        begin = tl.maximum(cached + first - window + 1, 0) // KEYS * KEYS
    tiles = tl.cdiv(end - begin, KEYS)
    each = tl.cdiv(tiles, splits)
    from_key = begin + split * each * KEYS
    to_key = tl.minimum(from_key + each * KEYS, end)
    whole = from_key
    if not WINDOW:
        whole = tl.maximum(tl.minimum(cached + first + 1, to_key) // KEYS * KEYS, from_key)

    top = tl.full([ROWS], float("-inf"), tl.float32)  # as exponents of two
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        if split == 0:
            top = tl.load(sinks + head, mask=is_row, other=0.0) * LOG2_E
            total += 1.0
    values = tl.zeros([ROWS, OUT_BLOCK], tl.float32)
    factor = LOG2_E if SOFT_CAP else scale * LOG2_E  # turns scores into exponents of two
    planes: tl.constexpr = 1 if LATENT else 2
    columns = tl.arange(0, OUT_BLOCK)
    for masked in tl.static_range(2):
        for key in range(whole if masked else from_key, to_key if masked else whole, KEYS):
            keys = key + tl.arange(0, KEYS)
            exists = (keys < to_key) if masked else (keys >= 0)
            block = tl.load(
                block_table + request.to(tl.int64) * table_stride + keys // BLOCK_SIZE, mask=exists, other=0
            )
            plane = cache + block.to(tl.int64) * block_stride + kv_head * planes * plane_size
            at = plane + keys % BLOCK_SIZE * DIM
            k = _lines(at, main, exists, DIM, MAIN, masked, True)
            if CELL:
                k_scales = tl.load(_scales(plane + BLOCK_SIZE * DIM) + keys % BLOCK_SIZE, mask=exists, other=0.0)
                k = _decoded(k, k_scales[None, :], dtype, CELL)
            scores = multiplied(q_main, k, tl.zeros([ROWS, KEYS], tl.float32), PRECISION)
            if REST > 0:
                k = tl.load(at[None, :] + rest[:, None], mask=exists[None, :] & (rest < DIM)[:, None], other=0)
                if CELL:
                    k = _decoded(k, k_scales[None, :], dtype, CELL)
                scores = multiplied(q_rest, k, scores, PRECISION)
            if SOFT_CAP:
                capped = scores * (scale / soft_cap)
                scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * capped))) * soft_cap  # tanh
            if masked:
                seen = exists[None, :] & (keys[None, :] <= position[:, None])
                if WINDOW:
                    seen = seen & (keys[None, :] > position[:, None] - window)
                scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
            weights = tl.exp2(scores * factor - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(weights, 1)
            if not LATENT:
                at += plane_size
                plane += plane_size
            v = _lines(at, columns, exists, OUT_DIM, OUT_BLOCK, masked, False)
            if CELL:
                v_scales = tl.load(_scales(plane + BLOCK_SIZE * DIM) + keys % BLOCK_SIZE, mask=exists, other=0.0)
                v = _decoded(v, v_scales[:, None], dtype, CELL)
            values = multiplied(weights.to(dtype), v, values * shrink[:, None], PRECISION)
            top = new_top

    row = (start + token).to(tl.int64) * (kv_heads * GROUP) + head
    values = values / tl.where(total > 0, total, 1.0)[:, None]
    log_sum = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    if not SPLIT:
        mask = is_row[:, None] & (columns < OUT_DIM)[None, :]
        tl.store(out + row[:, None] * OUT_DIM + columns[None, :], values.to(dtype), mask=mask)
        tl.store(lse + row, log_sum * LN_2, mask=is_row)
    else:
        part = row * splits + split
        tl.store(partial + part[:, None] * OUT_BLOCK + columns[None, :], values, mask=is_row[:, None])
        tl.store(partial_lse + part, log_sum, mask=is_row)


@triton.jit
def merge_kernel(
    out, lse, partial, partial_lse, OUT_DIM: tl.constexpr, OUT_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A program for each token and head. It adds up the partial results, weighted by their sums."""
    row = tl.program_id(0).to(tl.int64)
    split, columns = tl.arange(0, SPLITS), tl.arange(0, OUT_BLOCK)
    sums = tl.load(partial_lse + row * SPLITS + split)
    top = tl.max(sums)
    weights = tl.exp2(sums - top)
    parts = tl.load(partial + (row * SPLITS + split)[:, None] * OUT_BLOCK + columns[None, :])
    total = tl.sum(weights)
    merged = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + row * OUT_DIM + columns, merged.to(out.dtype.element_ty), mask=columns < OUT_DIM)
    tl.store(lse + row, (top + tl.log2(total)) * LN_2)
