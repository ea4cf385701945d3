"""Rounds rows to 8 bits for products, alone or together with the norm or the activation that makes the rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import quantized as reference
from quire.ops.reference.quantized import RoundedRows
from quire.ops.triton.elementwise import gated, norm_of_sum, warps_of
from quire.ops.triton.float8 import converts_float8, to_float8
from quire.ops.triton.targets import on_gpu, overlap, wait_for_previous


@triton.jit
def _store(wide, codes, scales, row, columns, dim, FLOAT8: tl.constexpr, NATIVE: tl.constexpr):
    """Write a row as codes of 8 bits, and their scale. wide: the row in float32, zero beyond dim."""
    top: tl.constexpr = 448.0 if FLOAT8 else 127.0
    scale = tl.maximum(tl.max(tl.abs(wide)) / top, 1e-30)
    tl.store(scales + row, scale)
    scaled = wide / scale
    if FLOAT8:
        code = to_float8(scaled, NATIVE)
    else:
        shift: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer
        code = ((scaled + shift) - shift).to(tl.int8).to(tl.uint8, bitcast=True)
    tl.store(codes + row * dim + columns, code, mask=columns < dim)


@triton.jit
def _rounded(
    x,
    codes,
    scales,
    ins,
    stride,
    FLOAT8: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One program for each row, as in the other kernels. BLOCK: at least ins. OVERLAPPED: see
    targets.overlaps_launches."""
    wait_for_previous(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    wide = tl.load(x + row * stride + at, mask=at < ins, other=0.0).to(tl.float32)
    _store(wide, codes, scales, row, at, ins, FLOAT8, NATIVE)


@triton.jit
def _add_rms_norm_rounded(
    x,
    residual,
    weight,
    codes,
    scales,
    x_stride,
    residual_stride,
    dim,
    eps,
    WIDE_WEIGHT: tl.constexpr,
    FLOAT8: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_previous(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    normed = norm_of_sum(x + row * x_stride, residual + row * residual_stride, weight, columns, dim, eps, WIDE_WEIGHT)
    _store(normed.to(tl.float32), codes, scales, row, columns, dim, FLOAT8, NATIVE)


@triton.jit
def _silu_and_mul_rounded(
    x,
    codes,
    scales,
    stride,
    half,
    FLOAT8: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_previous(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    gates = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    up = tl.load(x + row * stride + half + columns, mask=inside, other=0.0).to(tl.float32)
    product = gated(gates, up, 0.0, 0.0, 0).to(gates.dtype).to(tl.float32)
    _store(product, codes, scales, row, columns, half, FLOAT8, NATIVE)


def _empty(x: Tensor, size: int, code: torch.dtype) -> tuple[RoundedRows, Tensor]:
    """Return rows of `size` codes to be filled, and their bytes."""
    stored = x.new_empty(len(x), size, dtype=torch.uint8)
    scales = x.new_empty(len(x), dtype=torch.float32)
    return RoundedRows(stored.view(code), scales, x.dtype), stored


@reference.round_rows.implementation("triton", supports=on_gpu)
def round_rows(x: Tensor, code: torch.dtype) -> RoundedRows:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, ins = x.shape
    made, stored = _empty(x, ins, code)
    if rows:
        block = triton.next_power_of_2(ins)
        overlapped = overlap(x.device)
        _rounded[(rows,)](
            x,
            stored,
            made.scales,
            ins,
            x.stride(0),
            code.is_floating_point,
            converts_float8(x.device),
            block,
            bool(overlapped),
            num_warps=min(max(block // 1024, 1), 16),
            enable_fp_fusion=True,
            **overlapped,
        )
    return made


@reference.add_rms_norm_rounded.implementation("triton", supports=on_gpu)
def add_rms_norm_rounded(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, code: torch.dtype
) -> tuple[RoundedRows, Tensor]:
    """Overwrite the residual with the sum."""
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual.stride(1) == 1 and residual is not x else residual.contiguous().clone()
    rows, dim = x.shape
    made, stored = _empty(x, dim, code)
    if rows:
        block = triton.next_power_of_2(dim)
        overlapped = overlap(x.device)
        _add_rms_norm_rounded[(rows,)](
            x,
            residual,
            weight,
            stored,
            made.scales,
            x.stride(0),
            residual.stride(0),
            dim,
            eps,
            weight.dtype is not x.dtype,
            code.is_floating_point,
            converts_float8(x.device),
            block,
            bool(overlapped),
            num_warps=warps_of(block),
            enable_fp_fusion=True,
            **overlapped,
        )
    return made, residual


@reference.silu_and_mul_rounded.implementation("triton", supports=on_gpu)
def silu_and_mul_rounded(x: Tensor, code: torch.dtype) -> RoundedRows:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows = len(x)
    half = x.shape[1] // 2
    made, stored = _empty(x, half, code)
    if rows:
        block = triton.next_power_of_2(half)
        overlapped = overlap(x.device)
        _silu_and_mul_rounded[(rows,)](
            x,
            stored,
            made.scales,
            x.stride(0),
            half,
            code.is_floating_point,
            converts_float8(x.device),
            block,
            bool(overlapped),
            num_warps=min(max(block // 512, 1), 16),
            enable_fp_fusion=True,
            **overlapped,
        )
    return made
