"""Builds the flat batch of a step in one launch, with a program for each request and one for the padded tokens, and
appends the sampled tokens in another launch."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import batch as reference
from quire.ops.triton.targets import on_gpu

_BLOCK = 1024  # tokens per iteration


@triton.jit(
    do_not_specialize=["slots_stride", "num_requests", "num_tokens"],
    do_not_specialize_on_alignment=["rows", "query_start_loc", "input_ids", "positions", "slot_mapping", "seq_lens"],
)
def _flat_batch(
    token_ids,
    num_computed,
    block_tables,
    rows,
    query_start_loc,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    tokens_stride,
    group_stride,
    table_stride,
    slots_stride,
    num_requests,
    num_tokens,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    is_request = request < num_requests
    begin = tl.load(query_start_loc + request)
    end = tl.where(is_request, tl.load(query_start_loc + tl.minimum(request + 1, num_requests)), num_tokens)
    row = tl.load(rows + tl.minimum(request, num_requests - 1))
    computed = tl.load(num_computed + row)
    if is_request:
        tl.store(seq_lens + request, tl.where(end > begin, computed + end - begin, 0).to(tl.int32))
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < end
        known = token < tl.where(is_request, end, begin)
        position = tl.where(known, computed + token - begin, 0)
        token_id = tl.load(token_ids + row * tokens_stride + position, mask=known, other=0)
        tl.store(input_ids + token, token_id.to(tl.int64), mask=inside)
        tl.store(positions + token, position, mask=inside)
        for group in range(NUM_GROUPS):
            table = block_tables + group * group_stride + row * table_stride
            block = tl.load(table + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            slot = tl.where(known, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(slot_mapping + group * slots_stride + token, slot, mask=inside)


@reference.flat_batch.implementation("triton", supports=on_gpu)
def flat_batch(
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
) -> None:
    groups = len(block_tables)
    _flat_batch[(len(rows) + 1,)](
        token_ids,
        num_computed,
        block_tables,
        rows,
        query_start_loc,
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        token_ids.stride(0),
        block_tables.stride(0),
        block_tables.stride(1),
        slot_mapping.stride(0),
        len(rows),
        len(input_ids),
        groups,
        block_size,
        _BLOCK,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["rows", "positions", "sampled"])
def _append_tokens(token_ids, num_tokens, rows, positions, sampled, tokens_stride, places, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < places
    row = tl.load(rows + place, mask=exists, other=0)
    position = tl.load(positions + place, mask=exists, other=0)
    token = tl.load(sampled + place, mask=exists, other=0).to(tl.int32)
    tl.store(token_ids + row * tokens_stride + position + 1, token, mask=exists)
    tl.atomic_max(num_tokens + row, position + 2, mask=exists)


@reference.append_tokens.implementation("triton", supports=on_gpu)
def append_tokens(token_ids: Tensor, num_tokens: Tensor, rows: Tensor, positions: Tensor, sampled: Tensor) -> None:
    places = len(rows)
    block = 64
    if places:
        _append_tokens[(triton.cdiv(places, block),)](
            token_ids,
            num_tokens,
            rows,
            positions,
            sampled,
            token_ids.stride(0),
            places,
            block,
            num_warps=2,
            enable_fp_fusion=False,
        )
