"""Divides the attention of a step into work items of about equal length, and merges partial results.

A tile is a few neighbouring tokens of a request. The keys of a long tile are divided among several items, so that one
long request among short ones keeps as many processors busy as requests that are equally long (FlashInfer,
arXiv:2501.01005). The lengths are only on the device. A launch depends only on the numbers of tokens and requests, and
the host waits for nothing, as CUDA graphs require.

The plan is int32 [1 + items + merges, 4]:

    header    number of items of divided tiles, number of divided tiles
    items     request, first token of the tile among the request's tokens in the step, first key, end of the keys
    merges    request, first token, first item, number of items; one row for each divided tile

The items of divided tiles come first. Undivided tiles fill the rows from the last one on, so the last tiles of a
prompt, which see the most keys, start first. The request of an unused item is -1.
"""

import triton
import triton.language as tl

from quire.ops.triton.targets import wait_for_previous

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tiles(starts, lengths, tile, requests, tokens, keys, ONE_TILE: tl.constexpr):
    """Return (request, first token, key tiles) of some tiles. Tiles that do not exist have 0 key tiles."""
    if ONE_TILE:
        request = tile
    else:  # as in `part_of`, for several tiles at once
        low = tl.zeros_like(tile)
        high = low + requests
        steps = requests
        while steps > 0:
            middle = (low + high) // 2
            is_searched = low < high
            bound = tl.load(starts + middle, mask=is_searched, other=0)
            is_later = bound // tokens + middle <= tile
            low = tl.where(is_searched & is_later, middle + 1, low)
            high = tl.where(is_searched & (is_later == 0), middle, high)
            steps = steps // 2
        request = low - 1
    exists = request < requests
    start = tl.load(starts + request, mask=exists, other=0)
    count = tl.load(starts + request + 1, mask=exists, other=0) - start
    first = (tile - start // tokens - request) * tokens
    if ONE_TILE:
        first = tl.zeros_like(tile)
    length = tl.load(lengths + request, mask=exists, other=0)
    seen = tl.minimum(length - count + first + tokens, length)
    needed = tl.maximum((seen + keys - 1) // keys, 1)  # a query that sees no key still has a result: zeros
    return request, first, tl.where(exists & (first < count), needed, 0)


@triton.jit
def _put_row(rows, at, a, b, c, d, mask):
    tl.store(rows + at * 4, a, mask=mask)
    tl.store(rows + at * 4 + 1, b, mask=mask)
    tl.store(rows + at * 4 + 2, c, mask=mask)
    tl.store(rows + at * 4 + 3, d, mask=mask)


@triton.jit(
    do_not_specialize=["requests", "tiles", "items", "parts", "fewest", "most", "tokens", "keys"],
    do_not_specialize_on_alignment=["plan", "starts", "lengths"],
)
def plan_kernel(
    plan,
    starts,
    lengths,
    requests,
    tiles,
    items,
    parts,
    fewest,
    most,
    tokens,
    keys,
    ONE_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A single program. tiles: an upper bound of their number. items: rows of items in the plan, at least `tiles` +
    `parts`. parts: into about how many equal parts the work of the step is divided. fewest: key tiles of an item, at
    least. most: items of a tile, at most. tokens, keys: of a tile."""
    total = 0
    for begin in range(0, tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        _, _, needed = _tiles(starts, lengths, tile, requests, tokens, keys, ONE_TILE)
        total += tl.sum(needed)
    share = tl.maximum((total + parts - 1) // parts, fewest)

    rows = plan + 4
    merges = rows + items * 4
    divided_items = 0
    divided_tiles = 0
    undivided = 0
    for begin in range(0, tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        request, first, needed = _tiles(starts, lengths, tile, requests, tokens, keys, ONE_TILE)
        count = tl.minimum((needed + share - 1) // share, most)
        each = (needed + tl.maximum(count, 1) - 1) // tl.maximum(count, 1)
        count = (needed + tl.maximum(each, 1) - 1) // tl.maximum(each, 1)  # without empty items
        is_divided = count > 1
        is_whole = count == 1
        own = tl.where(is_divided, count, 0)
        at = divided_items + tl.cumsum(own, 0) - own
        merge = divided_tiles + tl.cumsum(is_divided.to(tl.int32), 0) - 1
        _put_row(merges, merge, request, first, at, count, is_divided)
        for part in range(tl.max(own)):
            begin_key = part * each * keys
            end_key = tl.minimum((part + 1) * each, needed) * keys
            _put_row(rows, at + part, request, first, begin_key, end_key, part < own)
        from_end = undivided + tl.cumsum(is_whole.to(tl.int32), 0)
        _put_row(rows, items - from_end, request, first, tl.zeros_like(tile), needed * keys, is_whole)
        divided_items += tl.sum(own)
        divided_tiles += tl.sum(is_divided.to(tl.int32))
        undivided += tl.sum(is_whole.to(tl.int32))
    tl.store(plan, divided_items)
    tl.store(plan + 1, divided_tiles)
    for begin in range(divided_items, items - undivided, BLOCK):
        unused = begin + tl.arange(0, BLOCK)
        tl.store(rows + unused * 4, -1, mask=unused < items - undivided)


@triton.jit(do_not_specialize=["items", "tokens"])
def merge_kernel(
    out,
    lse,
    partial,
    partial_lse,
    plan,
    starts,
    items,
    tokens,
    heads,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    PART: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Programs share the tokens of all divided tiles, for one head each. A program adds up at most MOST partial
    results, weighted by their sums. Partial results are [items, tokens of a tile, heads, DIM]. OVERLAPPED: see
    targets.overlaps_launches."""
    wait_for_previous(OVERLAPPED)
    head = tl.program_id(1)
    merges = plan + (1 + items) * 4
    every = tl.arange(0, MOST)
    columns = tl.arange(0, BLOCK)
    for at in range(tl.program_id(0), tl.load(plan + 1) * tokens, tl.num_programs(0)):
        merge = merges + at // tokens * 4
        request = tl.load(merge)
        token = tl.load(merge + 1) + at % tokens
        start = tl.load(starts + request)
        if token < tl.load(starts + request + 1) - start:
            first = tl.load(merge + 2)
            parts = tl.load(merge + 3)
            row = (first * tokens + at % tokens).to(tl.int64) * heads + head
            stride = tokens * heads  # from an item to the next one
            sums = tl.load(partial_lse + row + every * stride, mask=every < parts, other=float("-inf"))
            top = tl.max(sums)
            total = tl.sum(tl.exp2(sums - top))
            merged = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, parts, PART):
                part = begin + tl.arange(0, PART)
                exists = part < parts
                part_row = row + part.to(tl.int64) * stride
                weights = tl.exp2(tl.load(partial_lse + part_row, mask=exists, other=float("-inf")) - top)
                mask = exists[:, None] & (columns < DIM)[None, :]
                values = tl.load(partial + part_row[:, None] * DIM + columns[None, :], mask=mask, other=0.0)
                merged += tl.sum(values * weights[:, None], 0)
            result = (start + token).to(tl.int64) * heads + head
            tl.store(out + result * DIM + columns, (merged / total).to(out.dtype.element_ty), mask=columns < DIM)
            tl.store(lse + result, (top + tl.log2(total)) * LN_2)
