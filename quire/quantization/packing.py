"""Small integers in larger words, as checkpoints and as the engine keep them."""

import math

import torch
from torch import Tensor

from quire.ops.reference.quantized import QuantizedMatrix


def word_range(start: int, stop: int, bits: int) -> tuple[slice, int]:
    """Of a run of fields in 32-bit words: (the words with fields [start, stop), how many fields to skip there)."""
    period = math.lcm(bits, 32) // bits  # fields after which a word begins with a field again
    first = start // period * period
    return slice(first * bits // 32, -(-stop * bits // 32)), start - first


def unpack(words: Tensor, bits: int, count: int, skip: int = 0) -> Tensor:
    """Fields [skip, skip + count) of each row, from the lowest bits on. int32 [rows, n] -> uint8 [rows, count]"""
    span = math.lcm(bits, 32)
    words = torch.nn.functional.pad(words, (0, -words.shape[1] % (span // 32)))
    words = words.reshape(len(words), -1, span // 32).long() & 0xFFFFFFFF
    fields = []
    for place in range(0, span, bits):
        word, shift = divmod(place, 32)
        field = words[..., word] >> shift
        if shift + bits > 32:
            field |= words[..., word + 1] << (32 - shift)
        fields.append((field & ((1 << bits) - 1)).to(torch.uint8))
    return torch.stack(fields, dim=-1).flatten(1)[:, skip : skip + count]


def integer_matrix(
    codes: Tensor, bits: int, scales: Tensor, group: int, zeros: Tensor | None = None, offsets: Tensor | None = None,
    order: Tensor | None = None,
) -> QuantizedMatrix:  # fmt: skip
    """Weights (code - zero) * scale, or code * scale + offset.

    codes: uint8 [out, in] with values below 2^bits; scales, offsets: [out, groups]; zeros: integers [out, groups], None
    where all are 2^(bits - 1).
    """
    middle, width = 1 << (bits - 1), codes.shape[1]
    if zeros is not None and not bool((zeros == middle).all()):
        offsets = narrow(-zeros.float() * scales)
    if offsets is None:
        codes = codes + ((8 if bits <= 4 else 128) - middle)
    if bits <= 4:
        codes = torch.nn.functional.pad(codes, (0, width % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return QuantizedMatrix(codes.contiguous(), narrow(scales), group, width, offsets, order=order)


def narrow(values: Tensor) -> Tensor:
    """float32 in half the memory if that loses nothing."""
    for dtype in (torch.float16, torch.bfloat16) if values.dtype == torch.float32 else ():
        narrower = values.to(dtype)
        if torch.equal(narrower.float(), values):
            return narrower
    return values
