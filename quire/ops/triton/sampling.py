"""Arg-max and draws without synchronization. Rows are divided into parts, so that few rows occupy many multiprocessors.

With top-k, top-p or min-p, the logits are read twice, and nothing is sorted:

    _survey   parts   the largest logit of each group of 128 tokens, and the part's sum of exponentials
    _cutoff   rows    a logit below which no token can be kept, from these
    _gather   parts   copies the tokens above it, the candidates: a few hundred, usually
    _search   rows    finds the bound of top-k and top-p among the candidates, and draws from those that are kept

For rows without truncation, _gather draws the token. If no row is truncated, only _gather and _merge run.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from quire.ops.reference import sampling as reference
from quire.ops.triton.sampling_kernels import _cutoff, _gather, _merge, _search, _survey
from quire.ops.triton.targets import on_gpu
from quire.platform.gpu.cards import card_of

_PART = 4096  # tokens per program
_GROUP = 128  # tokens per group; the cutoff is found from each group's largest logit
_BLOCK = 1024  # candidates per iteration


@cache
def _no_limits(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return min_p, top_k and top_p that keep everything: [1] each."""
    return (
        torch.zeros(1, device=device),
        torch.full((1,), 2**31 - 1, dtype=torch.int64, device=device),
        torch.ones(1, device=device),
    )


def _select(
    logits: Tensor,
    temperature: Tensor | None,
    noise: tuple[Tensor, Tensor] | None,
    limits: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    draws: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the tokens, [rows], int64, and, if they are not drawn, their bounds: see `_search`.

    noise: seeds and positions. limits: min_p, top_k, top_p.
    """
    rows, vocab = logits.shape
    device = logits.device
    parts = triton.cdiv(vocab, _PART)
    groups = _PART // _GROUP
    out = torch.empty(rows, dtype=torch.int64, device=device)
    bounds = torch.empty(rows, device=device)
    if not rows:
        return out, bounds
    best = torch.empty(rows, parts, device=device)
    best_token = torch.empty(rows, parts, dtype=torch.int32, device=device)
    seeds, positions = noise or (out, out)
    scaled = temperature is not None
    is_truncated = any(limit is not None for limit in limits)
    divisors = bounds if temperature is None else temperature
    size = (logits.stride(0), logits.stride(1), vocab, parts)
    width = triton.next_power_of_2(parts)
    cutoffs = best_token
    values = best
    tokens = best_token
    if is_truncated:
        pairs = zip(limits, _no_limits(device), strict=True)
        given = [neutral if limit is None else limit for limit, neutral in pairs]
        strides = [int(limit is not None) for limit in limits]
        cutoffs = torch.empty(rows, dtype=torch.int32, device=device)
        tops = torch.empty(rows, device=device)
        masses = torch.empty(rows, device=device)
        sums = torch.empty(rows, parts, device=device)
        group_tops = torch.empty(rows, parts, groups, device=device)
        values = torch.empty(rows, parts, _PART, device=device)
        tokens = torch.empty(rows, parts, _PART, dtype=torch.int32, device=device)
        _survey[(rows, parts)](
            logits, divisors, group_tops, sums, *size, scaled, _PART, _GROUP, num_warps=8, enable_fp_fusion=False
        )
        _cutoff[(rows,)](
            group_tops,
            sums,
            cutoffs,
            tops,
            masses,
            *given,
            *strides,
            vocab,
            parts,
            width,
            groups,
            num_warps=8,
            enable_fp_fusion=False,
        )
    _gather[(rows, parts)](
        logits,
        divisors,
        seeds,
        positions,
        cutoffs,
        best,
        best_token,
        values,
        tokens,
        *size,
        scaled,
        noise is not None,
        is_truncated,
        _PART,
        _BLOCK,
        num_warps=8 if is_truncated else 4,
        enable_fp_fusion=False,
    )
    if is_truncated:
        _search[(rows,)](
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
            *given,
            *strides,
            vocab,
            parts,
            draws,
            width,
            _PART,
            _BLOCK // 2,
            num_warps=8,
            enable_fp_fusion=False,
            **card_of(device).most_registers(warps=8, programs=2),  # else ptxas uses 80 or 48 registers and spills
        )
    else:
        _merge[(rows,)](out, best, best_token, parts, width, num_warps=1, enable_fp_fusion=False)
    return out, bounds


@reference.argmax.implementation("triton", supports=on_gpu)
def argmax(logits: Tensor) -> Tensor:
    return _select(logits, None, None)[0]


@reference.sample_gumbel.implementation("triton", supports=on_gpu)
def sample_gumbel(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    return _select(logits, temperature, (seeds, positions), (min_p, top_k, top_p))[0]


@reference.keep_top_k_top_p.implementation("triton", supports=on_gpu)
def keep_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return a copy. This is used only for processed logprobs, since draws need no truncated logits in memory."""
    last, bounds = _select(logits, None, None, (None, top_k, top_p), draws=False)
    token = torch.arange(logits.shape[1], device=logits.device)
    bound = bounds[:, None]
    return logits.masked_fill((logits < bound) | ((logits == bound) & (token > last[:, None])), float("-inf"))
