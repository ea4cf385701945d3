"""Low-rank adapters: out += B A x, where each token may use a different adapter, in two launches.

_shrink    tokens, parts      A x, in float32
_expand    tokens, outputs    B times that, added to the outputs

A program computes 16 neighbouring tokens, or a single token if there are few. In both cases it multiplies 16 rows, some
of which may be zero, once for each adapter of its tokens. So the bits of a token's result do not depend on other
tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.lora import add_lora
from quire.ops.triton.linear_kernels import multiplied
from quire.ops.triton.targets import on_gpu, precision

_FEW = 64  # up to this number of tokens, each has its own programs
_INPUTS, _OUTPUTS = 128, 128  # per iteration; per program


@triton.jit
def _next_slot(slots, below):
    """Return the largest of `slots` that is less than `below`, -1 if there is none."""
    return tl.max(tl.where(slots < below, slots, -1))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _shrink(
    result,
    x,
    a,
    slots,
    ranks,
    tokens,
    x_stride,
    parts,
    rank,
    ins,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program for TOKENS tokens and a part. result: [tokens, parts, rank], float32."""
    part = tl.program_id(1)
    row = tl.arange(0, 16)
    of_rank = tl.arange(0, RANK)
    columns = tl.arange(0, INPUTS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row
    slot_of = tl.load(slots + token, mask=(row < TOKENS) & (token < tokens), other=-1)
    slot = _next_slot(slot_of, 1 << 40)
    while slot >= 0:
        used = tl.load(ranks + slot)
        if used > 0:
            mine = slot_of == slot
            matrix = a + (slot * parts + part) * rank * ins
            sums = tl.zeros([16, RANK], tl.float32)
            for begin in range(0, ins, INPUTS):
                inside = begin + columns < ins
                given = tl.load(
                    x + token[:, None] * x_stride + begin + columns[None, :],
                    mask=mine[:, None] & inside[None, :],
                    other=0.0,
                )
                weights = tl.load(
                    matrix + of_rank[None, :] * ins + begin + columns[:, None],
                    mask=(of_rank < used)[None, :] & inside[:, None],
                    other=0.0,
                )
                sums = multiplied(given, weights, sums, PRECISION)
            to = result + (token[:, None] * parts + part) * rank + of_rank[None, :]
            tl.store(to, sums, mask=mine[:, None] & (of_rank < used)[None, :])
        slot = _next_slot(slot_of, slot)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _expand(
    out,
    shrunk,
    b,
    slots,
    ranks,
    bounds,
    tokens,
    out_stride,
    parts,
    rank,
    outs,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program for TOKENS tokens and OUTPUTS outputs, which may belong to several parts."""
    begin = tl.program_id(1) * OUTPUTS
    row = tl.arange(0, 16)
    of_rank = tl.arange(0, RANK)
    output = begin + tl.arange(0, OUTPUTS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row
    slot_of = tl.load(slots + token, mask=(row < TOKENS) & (token < tokens), other=-1)
    slot = _next_slot(slot_of, 1 << 40)
    while slot >= 0:
        used = tl.load(ranks + slot)
        if used > 0:
            mine = slot_of == slot
            ranked = of_rank < used
            sums = tl.zeros([16, OUTPUTS], tl.float32)
            for part in range(parts):
                start = tl.load(bounds + part)
                stop = tl.load(bounds + part + 1)
                if (start < begin + OUTPUTS) & (stop > begin):
                    given = tl.load(
                        shrunk + (token[:, None] * parts + part) * rank + of_rank[None, :],
                        mask=mine[:, None] & ranked[None, :],
                        other=0.0,
                    )
                    weights = tl.load(
                        b + (slot * rank + of_rank[:, None]) * outs + output[None, :],
                        mask=ranked[:, None] & ((output >= start) & (output < stop))[None, :],
                        other=0.0,
                    )
                    sums = multiplied(given, weights.to(tl.float32), sums, PRECISION)
            to = out + token[:, None] * out_stride + output[None, :]
            mask = mine[:, None] & (output < outs)[None, :]
            tl.store(to, tl.load(to, mask=mask, other=0.0).to(tl.float32) + sums, mask=mask)
        slot = _next_slot(slot_of, slot)


@add_lora.implementation("triton", supports=on_gpu)
def add_lora_triton(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, ranks: Tensor, bounds: Tensor
) -> Tensor:
    (tokens, ins), (_, parts, rank, _), outs = x.shape, a.shape, b.shape[2]
    if x.stride(1) != 1 or out.stride(1) != 1:
        return add_lora.reference(out, x, a, b, slots, ranks, bounds)  # type: ignore[no-any-return]
    if not tokens:
        return out
    group = 1 if tokens <= _FEW else 16
    width = max(triton.next_power_of_2(rank), 16)
    groups = triton.cdiv(tokens, group)
    kind = precision(x.dtype)
    shrunk = torch.empty(tokens, parts, rank, dtype=torch.float32, device=x.device)
    _shrink[(groups, parts)](
        shrunk,
        x,
        a,
        slots,
        ranks,
        tokens,
        x.stride(0),
        parts,
        rank,
        ins,
        group,
        width,
        _INPUTS,
        kind,
        num_warps=4,
        enable_fp_fusion=True,
    )
    _expand[(groups, triton.cdiv(outs, _OUTPUTS))](
        out,
        shrunk,
        b,
        slots,
        ranks,
        bounds,
        tokens,
        out.stride(0),
        parts,
        rank,
        outs,
        group,
        width,
        _OUTPUTS,
        kind,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
