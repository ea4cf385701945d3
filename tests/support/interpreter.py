"""Makes Triton's interpreter compute what a GPU computes, and makes it check addresses.

- Products of bfloat16, float8 and int8; arithmetic and rounding in bfloat16; conversions to float8, which saturate.
- Inline PTX (see ptx.py).
- Each address of a load or store must lie within the tensor from whose pointer it was computed: from its first to its
  last element, strides included. compute-sanitizer would find addresses outside of allocations only.

It also chooses the card whose kernels are interpreted (`pytest --card`), which decides about tiles, splits and the
conversions that the kernels use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from quire.platform.gpu import cards
from support import ptx

_BOUNDS = "bounds"  # the attribute of pointers: (first address, address after the last, description)


class OutOfBoundsError(Exception):
    """A kernel reads or writes outside of the tensor that a pointer belongs to."""


def pose_as(card: cards.Card) -> None:
    """Let card_of(cpu) return this card."""
    cards.INTERPRETED = card
    cards.card_of.cache_clear()


def posing(card: cards.Card) -> Iterator[None]:
    """The body of a fixture: pose as the card during a test."""
    before = cards.INTERPRETED
    pose_as(card)
    yield
    pose_as(before)


def _wide(handle: Any) -> Any:
    """Return the data of a handle as numbers: bfloat16 and float8 are stored as their bits."""
    scalar = handle.dtype.scalar
    if scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    if scalar == tl.float8e4nv:
        return _torch(handle.data).view(torch.float8_e4m3fn).float().numpy()
    return handle.data


def _torch(data: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(data))  # a copy, as broadcast arrays cannot be shared


def _narrow(data: Any, dtype: Any) -> Any:
    """Return a handle of `dtype` with the nearest values, ties to even."""
    scalar = dtype.scalar
    if scalar == tl.bfloat16:
        bits = _torch(data).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    elif scalar == tl.float8e4nv:
        bits = _torch(data).float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    else:
        bits = data.astype(interpreter._get_np_dtype(scalar))
    return TensorHandle(bits, scalar)


_NARROW = (tl.bfloat16, tl.float8e4nv)


def _dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """Sums are computed in float64. On some processors, numpy's sums in float32 depend on the place of a row in its
    matrix, which those of GPUs do not."""
    product = np.matmul(_wide(a).astype(np.float64), _wide(b).astype(np.float64))
    return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _patched(method: Callable[..., Any], applies: Callable[..., bool], other: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, but `other` if the arguments need it."""

    @wraps(method)
    def call(*arguments: Any) -> Any:
        return other(*arguments) if applies(*arguments) else method(*arguments)

    return call


def _cast(builder: Any, src: Any, dst_type: Any, rounding_mode: Any = None) -> Any:
    return _narrow(_wide(src), dst_type)


def _is_narrow_cast(builder: Any, src: Any, dst_type: Any, *rest: Any) -> bool:
    return src.dtype.scalar in _NARROW or dst_type.scalar in _NARROW


def _binary(builder: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
    result = op(_wide(lhs), _wide(rhs))
    if result.dtype == np.bool_:
        return TensorHandle(result, tl.int1)
    return _narrow(result, lhs.dtype)


def _unary(builder: Any, arg: Any, op: Callable[..., Any]) -> Any:
    return _narrow(op(_wide(arg)), arg.dtype)


def _inline_asm(builder: Any, assembly: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Any:
    types = types if isinstance(types, (list, tuple)) else [types]
    (result,) = types
    dtype = interpreter._get_np_dtype(result.scalar)
    data = ptx.elementwise(assembly, constraints, [value.data for value in values], dtype, pack)
    return _Single(TensorHandle(data, result.scalar))


class _Single(list[Any]):
    """The results of inline assembly, which Triton takes from get_result."""

    def __init__(self, handle: Any) -> None:
        super().__init__([handle])

    def get_result(self, index: int) -> Any:
        return self[index]


def _with_bounds(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Note the bounds of a tensor at the pointer that a kernel gets for it."""

    @wraps(convert)
    def call(arg: Any) -> Any:
        made = convert(arg)
        if isinstance(arg, torch.Tensor):
            first = arg.data_ptr()
            span = sum((size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True))
            end = first + (span + 1) * arg.element_size() if arg.numel() else first
            made.handle.attr[_BOUNDS] = first, end, f"{list(arg.shape)} {arg.dtype}, strides {list(arg.stride())}"
        return made

    return call


def _kept(method: Callable[..., Any]) -> Callable[..., Any]:
    """A pointer computed from another one has its bounds."""

    @wraps(method)
    def call(builder: Any, *arguments: Any) -> Any:
        made = method(builder, *arguments)
        for argument in arguments:
            if isinstance(argument, TensorHandle) and _BOUNDS in argument.attr:
                made.attr.setdefault(_BOUNDS, argument.attr[_BOUNDS])
        return made

    return call


def _with_index(patch: Callable[..., None]) -> Callable[..., None]:
    """Let tensors of one element be numbers. numpy 2.5 converts no arrays with dimensions, as Triton 3.6 expects."""

    @wraps(patch)
    def call(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    return call


def _check(pointers: Any, mask: Any, access: str) -> None:
    bounds = pointers.attr.get(_BOUNDS)
    if bounds is None:
        return
    first, end, tensor = bounds
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    outside = ((pointers.data < first) | (pointers.data + np.uint64(size) > end)) & mask.data
    if np.any(outside):
        addresses = np.broadcast_to(pointers.data, outside.shape)[outside].astype(np.int64) - first
        raise OutOfBoundsError(
            f"{access} of {outside.sum()} addresses outside of a tensor {tensor}: bytes {addresses.min()} to "
            f"{addresses.max() + size} of {end - first}"
        )


def _masked_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    _check(pointers, mask, "load")
    return _masked_load_of_triton(builder, pointers, mask, *rest)


def _masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    _check(pointers, mask, "store")
    return _masked_store_of_triton(builder, pointers, value, mask, *rest)


_masked_load_of_triton = InterpreterBuilder.create_masked_load
_masked_store_of_triton = InterpreterBuilder.create_masked_store
_POINTERS = "addptr splat unsplat broadcast expand_dims reshape trans bitcast".split()


def install() -> None:
    """Change the interpreter of this process."""
    builder: Any = InterpreterBuilder
    builder.create_dot = _dot
    builder.create_inline_asm = _inline_asm
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, _patched(getattr(builder, name), _is_narrow_cast, _cast))
    builder.binary_op = _patched(builder.binary_op, lambda _, lhs, *rest: lhs.dtype.scalar in _NARROW, _binary)
    builder.unary_op = _patched(builder.unary_op, lambda _, arg, op: arg.dtype.scalar in _NARROW, _unary)
    builder.create_masked_load = _masked_load
    builder.create_masked_store = _masked_store
    for name in _POINTERS:
        setattr(builder, f"create_{name}", _kept(getattr(builder, f"create_{name}")))
    if not hasattr(builder, "get_bf16"):  # Triton 3.6
        builder.get_bf16 = lambda self, value: _narrow(np.array([value], dtype=np.float32), tl.bfloat16)
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    tl.dtype.value = property(lambda dtype: dtype)  # kernels unwrap constants, which the interpreter does not wrap
    interpreter._implicit_cvt = _with_bounds(interpreter._implicit_cvt)
