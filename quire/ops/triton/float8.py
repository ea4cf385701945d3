"""Conversion of float8_e4m3fn, whose codes kernels store as bytes.

Cards have instructions for it from compute capability 8.9 on. On other cards, and under Triton's interpreter, integer
arithmetic gives equal results.
"""

import torch
import triton
import triton.language as tl

from quire.platform.gpu.cards import card_of


def converts_float8(device: torch.device) -> bool:
    """The value of NATIVE below: whether the GPU has instructions for float8_e4m3fn."""
    capability = card_of(device).capability
    return isinstance(capability, int) and capability >= 89


@triton.jit
def from_float8(codes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Return the values of uint8 codes, in a type of at least 16 bits, in which all of them are exact."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    bits = codes.to(tl.uint16)
    magnitude = bits & 0x7F
    # As a float16 with the same exponent field, a value is too small by a factor of 2^8. This includes subnormal codes.
    halves = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), halves.to(tl.float16)).to(dtype)


@triton.jit
def to_float8(x, NATIVE: tl.constexpr):
    """Return the uint8 codes of the nearest values, ties to even. Larger values become 448; NaN stays NaN."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Keep 3 bits after the point: add half of the last place, slightly less if the last bit is even.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20).to(tl.int32) - (127 - 7) * 8
    # Below 2^-6 the step is 2^-9, which is also the step of float32 at 2^14: the addition rounds.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)
