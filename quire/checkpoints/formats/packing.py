"""Unpacks small integers from the words of checkpoints, and packs them in the engine's layout."""

import math

import torch
from torch import Tensor

from quire.ops.reference.quantized import QuantizedMatrix


def word_range(start: int, stop: int, bits: int) -> tuple[slice, int]:
    """Return the 32-bit words that contain the fields [start, stop) of a run, and the number of leading fields to
    skip."""
    period = math.lcm(bits, 32) // bits  # number of fields after which a field is aligned to a word again
    first = start // period * period
    return slice(first * bits // 32, -(-stop * bits // 32)), start - first


def unpack(words: Tensor, bits: int, count: int, skip: int = 0) -> Tensor:
    """Unpack the fields [skip, skip + count) of each line, lowest bits first. int32 [lines, n] -> uint8 [lines,
    count]"""
    span = math.lcm(bits, 32)
    words = torch.nn.functional.pad(words, (0, -words.shape[1] % (span // 32)))
    words = words.reshape(len(words), -1, span // 32).long() & 0xFFFFFFFF
    fields = []
    for first_bit in range(0, span, bits):
        word, shift = divmod(first_bit, 32)
        field = words[..., word] >> shift
        if shift + bits > 32:
            field |= words[..., word + 1] << (32 - shift)
        fields.append((field & ((1 << bits) - 1)).to(torch.uint8))
    return torch.stack(fields, dim=-1).flatten(1)[:, skip : skip + count]


def integer_matrix(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    group: int,
    zeros: Tensor | None = None,
    offsets: Tensor | None = None,
    order: Tensor | None = None,
    num_inputs: int | None = None,
) -> QuantizedMatrix:
    """Build a matrix of the weights (code - zero) * scale or, with offsets, code * scale + offset.

    codes: uint8 [out, in] with values below 2^bits; scales, offsets: [out, groups]; zeros: integers [out, groups], None
    if all are 2^(bits - 1). order, num_inputs: see QuantizedMatrix.
    """
    middle = 1 << (bits - 1)
    width = codes.shape[1]
    if zeros is not None and not bool((zeros == middle).all()):
        offsets = narrow(-zeros.float() * scales)
    if offsets is None:
        codes = codes + ((8 if bits <= 4 else 128) - middle)
    codes = pack_pairs(codes) if bits <= 4 else codes
    codes = codes.contiguous()
    scales = narrow(scales)
    return QuantizedMatrix(codes, scales, group, width, offsets, order=order, num_inputs=num_inputs, code_bits=bits)


def pack_pairs(codes: Tensor) -> Tensor:
    """Pack four-bit codes from one per byte to two per byte: [out, in] -> [out, ceil(in / 2)]"""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4


def narrow(values: Tensor) -> Tensor:
    """Convert float32 to float16 or bfloat16 if the conversion is exact."""
    for dtype in (torch.float16, torch.bfloat16) if values.dtype == torch.float32 else ():
        narrower = values.to(dtype)
        if torch.equal(narrower.float(), values):
            return narrower
    return values
