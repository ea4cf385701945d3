"""Norms, activations and rotary embedding, with one program for each row. Arithmetic is in float32, and results are
rounded to the tensors' type where the reference rounds them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import elementwise as reference
from quire.ops.triton.targets import on_gpu, overlap, wait_for_previous


@triton.jit
def norm_of(wide, weight, dim, eps, dtype: tl.constexpr, WIDE_WEIGHT: tl.constexpr):
    """wide: a row in float32, zero beyond dim -> the normed row times the weight, in `dtype`"""
    wide = wide * (1.0 / tl.sqrt(tl.sum(wide * wide) / dim + eps))
    if not WIDE_WEIGHT:
        wide = wide.to(dtype).to(tl.float32)
    return (wide * weight.to(tl.float32)).to(dtype)


@triton.jit
def norm_of_sum(x, residual, weight, columns, dim, eps, WIDE_WEIGHT: tl.constexpr):
    """Add a row of x to the same row of residual, and return the sum's norm. x, residual: the rows' first elements."""
    inside = columns < dim
    values = tl.load(x + columns, mask=inside, other=0.0)
    stream = tl.load(residual + columns, mask=inside, other=0.0)
    total = (values.to(tl.float32) + stream.to(tl.float32)).to(values.dtype)
    tl.store(residual + columns, total, mask=inside)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    return norm_of(total.to(tl.float32), factors, dim, eps, total.dtype, WIDE_WEIGHT)


@triton.jit
def _rms_norm(
    x,
    weight,
    out,
    inner,
    outer_stride,
    inner_stride,
    dim,
    eps,
    WIDE_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One program for each row, as in the other kernels. OVERLAPPED: see targets.overlaps_launches."""
    wait_for_previous(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    values = tl.load(x + row // inner * outer_stride + row % inner * inner_stride + columns, mask=inside, other=0.0)
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    normed = norm_of(values.to(tl.float32), scales, dim, eps, values.dtype, WIDE_WEIGHT)
    tl.store(out + row * dim + columns, normed, mask=inside)


@reference.rms_norm.implementation("triton", supports=on_gpu)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.contiguous()
    rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    outer, inner, dim = rows.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        block = triton.next_power_of_2(dim)
        overlapped = overlap(x.device)
        _rms_norm[(outer * inner,)](
            rows,
            weight,
            out,
            inner,
            rows.stride(0),
            rows.stride(1),
            dim,
            eps,
            weight.dtype is not x.dtype,
            block,
            bool(overlapped),
            num_warps=warps_of(block),
            enable_fp_fusion=True,
            **overlapped,
        )
    return out


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    x_stride,
    residual_stride,
    dim,
    eps,
    WIDE_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_previous(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x += row * x_stride
    normed = norm_of_sum(x, residual + row * residual_stride, weight, columns, dim, eps, WIDE_WEIGHT)
    tl.store(x + columns, normed, mask=columns < dim)


@reference.add_rms_norm.implementation("triton", supports=on_gpu)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Overwrite both arguments: residual with the sum, x with the norm."""
    if x.stride(1) != 1 or residual.stride(1) != 1 or x is residual:
        return reference.add_rms_norm.reference(x, residual, weight, eps)  # type: ignore[no-any-return]
    rows, dim = x.shape
    if rows:
        block = triton.next_power_of_2(dim)
        overlapped = overlap(x.device)
        _add_rms_norm[(rows,)](
            x,
            residual,
            weight,
            x.stride(0),
            residual.stride(0),
            dim,
            eps,
            weight.dtype is not x.dtype,
            block,
            bool(overlapped),
            num_warps=warps_of(block),
            enable_fp_fusion=True,
            **overlapped,
        )
    return x, residual


def warps_of(block: int) -> int:
    """Let each thread load 8 elements (16 bytes of bfloat16). Decoding has few rows, so a row needs many threads."""
    return max(1, min(16, block // 256))


SILU, GELU, GELU_TANH, SWIGLU_OAI, LIMITED, LIMITED_AFTER = range(6)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gated(gates, up, alpha, limit, KIND: tl.constexpr):
    """The gated activation KIND of some elements: gates in the tensors' type, up in float32 -> in float32, before its
    last rounding."""
    dtype = gates.dtype
    gate = gates.to(tl.float32)
    if KIND == 3:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        product = (up + 1.0) * gate * _sigmoid(alpha * gate)
    elif KIND >= 4:
        if KIND == 4:
            gate = tl.minimum(gate, limit)
        active = tl.minimum(gate * _sigmoid(gate), limit)
        product = active * tl.minimum(tl.maximum(up, -limit), limit)
    else:
        if KIND == 0:
            active = gate * _sigmoid(gate)
        elif KIND == 1:
            active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
        else:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
            active = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        product = active.to(dtype).to(tl.float32) * up
    return product


@triton.jit
def _gate(x, out, stride, half, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr):
    wait_for_previous(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < half
    gates = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    up = tl.load(x + row * stride + half + columns, mask=inside, other=0.0).to(tl.float32)
    product = gated(gates, up, alpha, limit, KIND)
    tl.store(out + row * half + columns, product.to(gates.dtype), mask=inside)


def _gated(kind: int, x: Tensor, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    half = x.shape[1] // 2
    out = x.new_empty(rows, half)
    if out.numel():
        block = min(1024, triton.next_power_of_2(half))
        overlapped = overlap(x.device)
        _gate[(rows, triton.cdiv(half, block))](
            x, out, x.stride(0), half, alpha, limit, kind, block, bool(overlapped), enable_fp_fusion=True, **overlapped
        )
    return out


@reference.silu_and_mul.implementation("triton", supports=on_gpu)
def silu_and_mul(x: Tensor) -> Tensor:
    return _gated(SILU, x)


@reference.gelu_and_mul.implementation("triton", supports=on_gpu)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    return _gated(GELU_TANH if approximate == "tanh" else GELU, x)


@reference.swiglu_oai.implementation("triton", supports=on_gpu)
def swiglu_oai(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    return _gated(SWIGLU_OAI, x, alpha, limit)


@reference.limited_swiglu.implementation("triton", supports=on_gpu)
def limited_swiglu(x: Tensor, limit: float, after: bool = False) -> Tensor:
    return _gated(LIMITED_AFTER if after else LIMITED, x, 1.0, limit)


@triton.jit
def rotate(first, second, cos, sin, dtype: tl.constexpr):
    """Rotate the pairs (first, second) by their angles; the result is in `dtype`."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _rotary(
    q,
    k,
    cos,
    sin,
    q_stride,
    q_head_stride,
    heads,
    k_stride,
    k_head_stride,
    half,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and head. The heads of q come first."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < heads:
        x = q + token * q_stride + head * q_head_stride
    else:
        x = k + token * k_stride + (head - heads) * k_head_stride
    pair = tl.arange(0, BLOCK)
    inside = pair < half
    if INTERLEAVED:
        at_first = 2 * pair
        at_second = 2 * pair + 1
    else:
        at_first = pair
        at_second = pair + half
    first = tl.load(x + at_first, mask=inside, other=0.0)
    second = tl.load(x + at_second, mask=inside, other=0.0)
    c = tl.load(cos + token * half + pair, mask=inside)
    s = tl.load(sin + token * half + pair, mask=inside)
    first, second = rotate(first, second, c, s, first.dtype)
    tl.store(x + at_first, first, mask=inside)
    tl.store(x + at_second, second, mask=inside)


@reference.rotary_embedding.implementation("triton", supports=on_gpu)
def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in place."""
    tokens, heads, _ = q.shape
    half = cos.shape[1]
    if tokens:
        cos = cos.contiguous()
        sin = sin.contiguous()
        _rotary[(tokens, heads + k.shape[1])](
            q,
            k,
            cos,
            sin,
            q.stride(0),
            q.stride(1),
            heads,
            k.stride(0),
            k.stride(1),
            half,
            interleaved,
            triton.next_power_of_2(half),
            num_warps=1,
            enable_fp_fusion=True,
        )
    return q, k
