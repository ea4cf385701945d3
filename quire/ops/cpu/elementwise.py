"""Norms, activations and rotary embedding in C++. These functions pass addresses and strides to elementwise.cpp.

They are called hundreds of times per step, often on a few kilobytes, so each call must take only a few microseconds.
"""

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel, library
from quire.ops.reference import elementwise as reference
from quire.ops.registry import Target


def on_cpu(target: Target) -> bool:
    return target.device.type == "cpu" and target.dtype in CODES and library() is not None


@reference.rms_norm.implementation("cpu", supports=on_cpu)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = x.dtype
    wide_weight = weight.dtype is torch.float32
    dims = x.dim()
    inner = 1
    inner_stride = 0
    last = 0
    if dims == 2:
        (outer, dim), (outer_stride, last) = x.shape, x.stride()
    elif dims == 3:
        (outer, inner, dim), (outer_stride, inner_stride, last) = x.shape, x.stride()
    if last != 1 or not (wide_weight or weight.dtype is dtype):
        return reference.rms_norm.reference(x, weight, eps)  # type: ignore[no-any-return]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernel("quire_rms_norm", "iiplllllpfpi")(
        CODES[dtype],
        wide_weight,
        x.data_ptr(),
        outer,
        inner,
        outer_stride,
        inner_stride,
        dim,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@reference.add_rms_norm.implementation("cpu", supports=on_cpu)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Overwrite both arguments: residual with the sum, x with the norm."""
    dtype = x.dtype
    wide_weight = weight.dtype is torch.float32
    to = residual.data_ptr()
    source = x.data_ptr()
    rows, dim = x.shape
    stride, last = x.stride()
    to_stride, to_last = residual.stride()
    same_types = residual.dtype is dtype and (wide_weight or weight.dtype is dtype)
    if not same_types or last != 1 or to_last != 1 or (rows and source == to):
        return reference.add_rms_norm.reference(x, residual, weight, eps)  # type: ignore[no-any-return]
    kernel("quire_add_rms_norm", "iiplplllpfi")(
        CODES[dtype],
        wide_weight,
        source,
        stride,
        to,
        to_stride,
        rows,
        dim,
        weight.data_ptr(),
        eps,
        torch.get_num_threads(),
    )
    return x, residual


def _layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """x, out: [rows, dim] or [tokens, heads, dim]. residual: overwritten with x + residual, which is then normed."""
    is_flat = x.dim() == 2
    outer = len(x)
    inner = 1 if is_flat else x.shape[1]
    inner_stride = 0 if is_flat else x.stride(1)
    kernel("quire_layer_norm", "ipllllpllplpfpi")(
        CODES[x.dtype],
        x.data_ptr(),
        outer,
        inner,
        x.stride(0),
        inner_stride,
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        x.shape[-1],
        None if weight is None else weight.data_ptr(),
        0 if weight is None or weight.dim() == 1 else weight.stride(0),
        None if bias is None else bias.data_ptr(),
        eps,
        out.data_ptr(),
        torch.get_num_threads(),
    )


def _fits(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether x is [rows, dim] or [tokens, heads, dim] with dense rows, and the others have its type."""
    is_dense = x.dim() in (2, 3) and x.stride(-1) == 1
    return is_dense and all(other is None or other.dtype is x.dtype for other in others)


@reference.layer_norm.implementation("cpu", supports=on_cpu)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if not _fits(x, weight, bias):
        return reference.layer_norm.reference(x, weight, bias, eps)  # type: ignore[no-any-return]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _layer_norm(x, None, weight, bias, eps, out)
    return out


@reference.add_layer_norm.implementation("cpu", supports=on_cpu)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Overwrite the residual stream with the sum."""
    if not (_fits(x, residual, weight, bias) and _fits(residual)) or (len(x) and x.data_ptr() == residual.data_ptr()):
        return reference.add_layer_norm.reference(x, residual, weight, bias, eps)  # type: ignore[no-any-return]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _layer_norm(x, residual, weight, bias, eps, out)
    return out, residual


@reference.add.implementation("cpu", supports=on_cpu)
def add(x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
    if not x.is_contiguous() or not residual.is_contiguous() or not out.is_contiguous():
        return reference.add.reference(x, residual, out)  # type: ignore[no-any-return]
    kernel("quire_add", "ipplpi")(
        CODES[x.dtype], x.data_ptr(), residual.data_ptr(), x.numel(), out.data_ptr(), torch.get_num_threads()
    )
    return out


@reference.multiply.implementation("cpu", supports=on_cpu)
def multiply(x: Tensor, factor: Tensor | float) -> Tensor:
    rows, dim = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(rows, dim)
    number = 1.0
    factors = None
    by_row = 0
    by_column = 0
    is_wide = True
    if isinstance(factor, Tensor):
        is_wide = factor.dtype is torch.float32
        by_column = int(factor.shape[-1] == dim)
        factor = factor.contiguous() if by_column and factor.stride(-1) != 1 else factor
        factors = factor.data_ptr()
        by_row = factor.stride(0) if factor.dim() == 2 else 0
    else:
        number = factor
    kernel("quire_multiply", "iiplllfpllpi")(
        CODES[x.dtype],
        is_wide,
        x.data_ptr(),
        x.stride(0),
        rows,
        dim,
        number,
        factors,
        by_row,
        by_column,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@reference.lerp.implementation("cpu", supports=on_cpu)
def lerp(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    x = x.contiguous()
    other = other.contiguous()
    weight = weight.contiguous()
    mixes, weight_rows, dim = weight.shape
    out = x.new_empty(mixes, len(x), dim)
    kernel("quire_lerp", "iipplllplpi")(
        CODES[x.dtype],
        weight.dtype is torch.float32,
        x.data_ptr(),
        other.data_ptr(),
        mixes,
        len(x),
        dim,
        weight.data_ptr(),
        weight_rows,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@reference.row_sums.implementation("cpu", supports=on_cpu)
def row_sums(x: Tensor) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(len(x), 1, dtype=torch.float32)
    kernel("quire_row_sums", "iplllpi")(
        CODES[x.dtype], x.data_ptr(), x.stride(0), *x.shape, out.data_ptr(), torch.get_num_threads()
    )
    return out


def _gate(activation: int, x: Tensor, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """activation: 0 is silu, 1 gelu, 2 gelu by tanh, 3 gpt-oss' activation, 4 relu, 5 its square, 6 silu of limited
    gates, 7 limited silu, as in elementwise.cpp."""
    rows, width = x.shape
    stride, last = x.stride()
    if last != 1:
        x = x.contiguous()
        stride = width
    out = x.new_empty(rows, width // 2)
    kernel("quire_gate", "iiffplllpi")(
        CODES[x.dtype],
        activation,
        alpha,
        limit,
        x.data_ptr(),
        stride,
        rows,
        width // 2,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@reference.silu_and_mul.implementation("cpu", supports=on_cpu)
def silu_and_mul(x: Tensor) -> Tensor:
    return _gate(0, x)


@reference.gelu_and_mul.implementation("cpu", supports=on_cpu)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    return _gate(2 if approximate == "tanh" else 1, x)


@reference.swiglu_oai.implementation("cpu", supports=on_cpu)
def swiglu_oai(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    return _gate(3, x, alpha, limit)


@reference.limited_swiglu.implementation("cpu", supports=on_cpu)
def limited_swiglu(x: Tensor, limit: float, after: bool = False) -> Tensor:
    return _gate(7 if after else 6, x, 1.0, limit)


@reference.relu_and_mul.implementation("cpu", supports=on_cpu)
def relu_and_mul(x: Tensor, squared: bool = False) -> Tensor:
    return _gate(5 if squared else 4, x)


@reference.xielu.implementation("cpu", supports=on_cpu)
def xielu(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernel("quire_xielu", "iplllpppi")(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        positive.data_ptr(),
        negative.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@reference.clip.implementation("cpu", supports=on_cpu)
def clip(x: Tensor, most: float) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernel("quire_clip", "iplllfpi")(
        CODES[x.dtype], x.data_ptr(), x.stride(0), *x.shape, most, out.data_ptr(), torch.get_num_threads()
    )
    return out


_ACTIVATIONS = ("silu", "gelu_tanh", "sigmoid", "gelu", "relu", "relu2", "tanh")  # in the order of elementwise.cpp


@reference.activate.implementation("cpu", supports=on_cpu)
def activate(x: Tensor, name: str) -> Tensor:
    if x.dim() != 2 or x.dtype not in CODES:
        return reference.activate.reference(x, name)  # type: ignore[no-any-return]
    rows, dim = x.shape
    stride, last = x.stride()
    if last != 1:
        x = x.contiguous()
        stride = dim
    out = x.new_empty(rows, dim)
    kernel("quire_activate", "iiplllpi")(
        CODES[x.dtype],
        _ACTIVATIONS.index(name),
        x.data_ptr(),
        stride,
        rows,
        dim,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@reference.rotary_embedding.implementation("cpu", supports=on_cpu)
def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in place."""
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos = cos.contiguous()
        sin = sin.contiguous()
    tokens, heads, _ = q.shape
    q_stride, q_head_stride, _ = q.stride()
    k_stride, k_head_stride, _ = k.stride()
    kernel("quire_rotary", "iplllplllppllii")(
        CODES[q.dtype],
        q.data_ptr(),
        q_stride,
        q_head_stride,
        heads,
        k.data_ptr(),
        k_stride,
        k_head_stride,
        k.shape[1],
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        tokens,
        interleaved,
        torch.get_num_threads(),
    )
    return q, k
