"""Verification of drafts: counting takes one launch, the p/q rule three.

_masses                parts   the largest logit and the sum of exponentials, for the target and for the drafter
_accept_or_resample parts finds the part's best token if the draft is rejected; all parts of a row make the same
decision _merge rows the best token of the parts
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import drafts as reference
from quire.ops.triton.sampling_kernels import _first, _first_best, _merge
from quire.ops.triton.targets import on_gpu

_PART = 4096  # tokens per program
_BLOCK = 1024  # tokens per iteration
_PLACES = 16  # places per iteration
_ACCEPTANCE, _RESAMPLING = tl.constexpr(reference.ACCEPTANCE), tl.constexpr(reference.RESAMPLING)


@triton.jit(do_not_specialize_on_alignment=["rows", "positions", "sampled", "place_start_loc"])
def _count_kept(kept, token_ids, rows, positions, sampled, place_start_loc, tokens_stride, PLACES: tl.constexpr):
    """One program for each request."""
    request = tl.program_id(0)
    start = tl.load(place_start_loc + request)
    end = tl.load(place_start_loc + request + 1)
    first_other = end - 1
    for begin in range(start, end - 1, PLACES):
        place = begin + tl.arange(0, PLACES)
        has_draft = place < end - 1
        row = tl.load(rows + place, mask=has_draft, other=0)
        position = tl.load(positions + place, mask=has_draft, other=0)
        draft = tl.load(token_ids + row * tokens_stride + position + 1, mask=has_draft, other=0)
        token = tl.load(sampled + place, mask=has_draft, other=0)
        first_other = tl.minimum(first_other, tl.min(tl.where(has_draft & (draft != token), place, end - 1)))
    tl.store(kept + request, tl.where(start < end, first_other - start + 1, 0))


@reference.count_kept.implementation("triton", supports=on_gpu)
def count_kept(token_ids: Tensor, rows: Tensor, positions: Tensor, sampled: Tensor, place_start_loc: Tensor) -> Tensor:
    requests = len(place_start_loc) - 1
    kept = torch.empty(requests, dtype=torch.int64, device=rows.device)
    if requests:
        _count_kept[(requests,)](
            kept,
            token_ids,
            rows,
            positions,
            sampled,
            place_start_loc,
            token_ids.stride(0),
            _PLACES,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return kept


@triton.jit
def _probability(logit, top, factor):
    return tl.exp(logit.to(tl.float32) - top) * factor


@triton.jit
def _uniform(word):
    """Return noise from 32 random bits, as defined by the reference."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _mass(logits, stride, vocab, top, total, PART: tl.constexpr):
    """Write the largest logit of a part of a row, and the sum of exp(logit - the largest), NaN if softmax is NaN."""
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    x = tl.load(logits + token.to(tl.int64) * stride, mask=token < vocab, other=float("-inf")).to(tl.float32)
    is_number = x < float("inf")  # false for NaN
    largest = tl.max(tl.where(is_number, x, float("-inf")))
    exponential = tl.where(x == float("-inf"), 0.0, tl.exp(x - largest))
    tl.store(top, largest)
    tl.store(total, tl.sum(tl.where(is_number, exponential, float("nan"))))


@triton.jit
def _masses(p, q, tops, sums, p_row_stride, p_stride, q_row_stride, q_stride, vocab, parts, PART: tl.constexpr):
    """One program for each part of a row of p, and of q. tops, sums: [2, places, parts]."""
    place = tl.program_id(0).to(tl.int64)
    model = tl.program_id(2)
    index = (model * tl.num_programs(0) + place) * parts + tl.program_id(1)
    if model == 0:
        _mass(p + place * p_row_stride, p_stride, vocab, tops + index, sums + index, PART)
    else:
        _mass(q + place * q_row_stride, q_stride, vocab, tops + index, sums + index, PART)


@triton.jit
def _softmax(tops, sums, parts, PARTS: tl.constexpr):
    """Return a row's largest logit, the factor of exp(logit - the largest) in its softmax, and whether that exists."""
    part = tl.arange(0, PARTS)
    part_tops = tl.load(tops + part, mask=part < parts, other=float("-inf"))
    part_sums = tl.load(sums + part, mask=part < parts, other=0.0)
    top = tl.max(part_tops)
    total = tl.sum(tl.where(part_sums == 0.0, 0.0, part_sums * tl.exp(part_tops - top)))
    return top, 1.0 / total, total > 0.0


@triton.jit(do_not_specialize_on_alignment=["drafts", "seeds", "positions"])
def _accept_or_resample(
    p,
    q,
    drafts,
    seeds,
    positions,
    tops,
    sums,
    best,
    best_token,
    p_row_stride,
    p_stride,
    q_row_stride,
    q_stride,
    vocab,
    parts,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each part of a row. If the draft is rejected, it writes the part's best token and that token's
    value, which is max(p - q, 0) divided by exponential noise. Otherwise it writes the draft with the value 0."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    places = tl.num_programs(0)
    index = place * parts + part
    p += place * p_row_stride
    q += place * q_row_stride
    p_top, p_factor, p_exists = _softmax(tops + place * parts, sums + place * parts, parts, PARTS)
    q_row = (places + place) * parts
    q_top, q_factor, q_exists = _softmax(tops + q_row, sums + q_row, parts, PARTS)
    draft = tl.load(drafts + place)
    at = tl.maximum(draft, 0)
    p_draft = _probability(tl.load(p + at * p_stride), p_top, p_factor)
    q_draft = _probability(tl.load(q + at * q_stride), q_top, q_factor)
    is_drawn = p_exists & q_exists & (draft >= 0) & (q_draft > 0.0)
    seed = tl.load(seeds + place)
    position = tl.load(positions + place).to(tl.uint32)
    none = position * 0
    word, _, _, _ = tl.philox(seed ^ _ACCEPTANCE, none, position, none, none)
    otherwise = tl.where(is_drawn, draft, 0).to(tl.int32)  # if nothing is left to draw from
    if (is_drawn & (_uniform(word) * q_draft < p_draft)) | ~p_exists:
        tl.store(best + index, 0.0)
        tl.store(best_token + index, otherwise)
        return
    values = tl.zeros([BLOCK // 4, 4], tl.float32)
    value_tokens = tl.full([BLOCK // 4, 4], 2147483647, tl.int32)
    for begin in range(part * PART, tl.minimum((part + 1) * PART, vocab), BLOCK):
        group = begin // 4 + tl.arange(0, BLOCK // 4)
        token = group[:, None] * 4 + tl.arange(0, 4)[None, :]
        cell = token.to(tl.int64)
        left = _probability(tl.load(p + cell * p_stride, mask=token < vocab, other=float("-inf")), p_top, p_factor)
        if is_drawn:
            drafter = tl.load(q + cell * q_stride, mask=token < vocab, other=float("-inf"))
            left -= _probability(drafter, q_top, q_factor)
        zero = tl.zeros_like(group).to(tl.uint32)
        a, b, c, d = tl.philox(seed ^ _RESAMPLING, group.to(tl.uint32), zero + position, zero, zero)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK // 4, 4])
        values, value_tokens = _first_best(left / -tl.log(_uniform(words)), token, values, value_tokens)
    top, token = _first(values, value_tokens)
    tl.store(best + index, top)
    tl.store(best_token + index, tl.where(top > 0.0, token, otherwise))


@reference.accept_or_resample.implementation("triton", supports=on_gpu)
def accept_or_resample(p: Tensor, q: Tensor, drafts: Tensor, seeds: Tensor, output_positions: Tensor) -> Tensor:
    places, vocab = p.shape
    tokens = torch.empty(places, dtype=torch.int64, device=p.device)
    if not places:
        return tokens
    parts = triton.cdiv(vocab, _PART)
    tops, sums = torch.empty(2, 2, places, parts, device=p.device)
    best = torch.empty(places, parts, device=p.device)
    best_token = torch.empty(places, parts, dtype=torch.int32, device=p.device)
    sizes = *p.stride(), *q.stride(), vocab, parts
    width = triton.next_power_of_2(parts)
    _masses[(places, parts, 2)](p, q, tops, sums, *sizes, _PART, num_warps=8, enable_fp_fusion=False)
    _accept_or_resample[(places, parts)](
        p,
        q,
        drafts,
        seeds,
        output_positions,
        tops,
        sums,
        best,
        best_token,
        *sizes,
        width,
        _PART,
        _BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _merge[(places,)](tokens, best, best_token, parts, width, num_warps=1, enable_fp_fusion=False)
    return tokens
