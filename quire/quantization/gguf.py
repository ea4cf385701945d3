"""Decodes the tensor types of GGUF files (ggml's quantized blocks) into the engine's own layout.

The layouts are those of ggml's ggml-common.h. The values equal those of ggml's reference dequantization bit for bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import LinearShape, LinearWeight, dense_weight
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix
from quire.quantization.gguf_types import TensorType
from quire.quantization.packing import integer_matrix, narrow
from quire.quantization.scheme import Groups, Piece, Scheme, slot


def _fields(x: Tensor, run: int, bits: int, count: int) -> Tensor:
    """Unpack `count` fields of `bits` bits from each byte. [..., bytes] -> [..., bytes * count]

    Of each `run` bytes, the lowest fields of all bytes come first, then the next fields of all bytes.
    """
    shifts = torch.arange(0, bits * count, bits, dtype=torch.uint8)[:, None]
    return (x.reshape(*x.shape[:-1], -1, 1, run) >> shifts & ((1 << bits) - 1)).flatten(-3)


def _half(x: Tensor, offset: int) -> Tensor:
    """The float16 at byte `offset` of each block: [out, blocks]"""
    return x[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0]


def _matrix(codes: Tensor, bits: int, scales: Tensor, offsets: Tensor | None = None) -> QuantizedMatrix:
    """codes: [out, blocks, elements]; scales, offsets: [out, groups]. Without offsets, code 2^(bits - 1) means 0."""
    codes = codes.flatten(1)
    return integer_matrix(codes, bits, scales, codes.shape[1] // scales.shape[1], offsets=offsets)


def _simple(x: Tensor, bits: int, has_minimum: bool) -> QuantizedMatrix:
    """Q4_0, Q4_1, Q5_0, Q5_1. A block has: d, m (if has_minimum), fifth bits (if bits == 5), 4 bits of each of 32
    elements."""
    start = 4 if has_minimum else 2  # offset of the fifth bits
    codes = _fields(x[..., -16:], 16, 4, 2)
    if bits == 5:
        codes = codes | _fields(x[..., start : start + 4], 1, 1, 8) << 4
    return _matrix(codes, bits, _half(x, 0), _half(x, 2) if has_minimum else None)


def _q8_0(x: Tensor) -> QuantizedMatrix:
    return _matrix(x[..., 2:] ^ 128, 8, _half(x, 0))


def _super_blocks(matrix: QuantizedMatrix, *factors: Tensor) -> QuantizedMatrix:
    return replace(matrix, factors=torch.stack(factors, dim=-1))


def _q2_k(x: Tensor) -> QuantizedMatrix:
    scales, codes = x[..., :16].flatten(1), _fields(x[..., 16:80], 32, 2, 4)
    return _super_blocks(_matrix(codes, 2, scales & 15, scales >> 4), _half(x, 80), -_half(x, 82))


def _q3_k(x: Tensor) -> QuantizedMatrix:
    codes = _fields(x[..., 32:96], 32, 2, 4) | _fields(x[..., :32], 32, 1, 8) << 2
    scales = _fields(x[..., 96:104], 8, 4, 2) | _fields(x[..., 104:108], 4, 2, 4) << 4
    return _super_blocks(_matrix(codes, 3, scales.flatten(1).view(torch.int8) - 32), _half(x, 108))


def _q45_k(x: Tensor, bits: int) -> QuantizedMatrix:
    """Q4_K, Q5_K: eight groups of 32 elements. Bytes 4 to 16 have their 6-bit scales and minima: those of the first
    four groups whole, those of the last four in two parts."""
    low, minimum, mixed = x[..., 4:8], x[..., 8:12], x[..., 12:16]
    scales = torch.cat([low & 63, mixed & 15 | low >> 2 & 48], dim=-1)
    minima = torch.cat([minimum & 63, mixed >> 4 | minimum >> 2 & 48], dim=-1)
    codes = _fields(x[..., -128:], 32, 4, 2)
    if bits == 5:
        codes = codes | _fields(x[..., 16:48], 32, 1, 8) << 4
    return _super_blocks(_matrix(codes, bits, scales.flatten(1), minima.flatten(1)), _half(x, 0), -_half(x, 2))


def _q6_k(x: Tensor) -> QuantizedMatrix:
    codes = _fields(x[..., :128], 64, 4, 2) | _fields(x[..., 128:192], 32, 2, 4) << 4
    scales = x[..., 192:208].flatten(1).view(torch.int8)
    return _super_blocks(_matrix(codes, 6, scales), _half(x, 208))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _from_table(codes: Tensor, scales: Tensor, table: tuple[int, ...]) -> QuantizedMatrix:
    return replace(_matrix(codes, 4, scales), table=table)


def _iq4_nl(x: Tensor) -> QuantizedMatrix:
    return _from_table(_fields(x[..., 2:], 16, 4, 2), _half(x, 0), _IQ4)


def _iq4_xs(x: Tensor) -> QuantizedMatrix:
    """Bytes 2 to 8 have the scales of eight groups of 32 elements: their upper 2 bits, then their lower 4."""
    scales = _fields(x[..., 4:8], 1, 4, 2) | _fields(x[..., 2:4], 1, 2, 4) << 4
    matrix = _from_table(_fields(x[..., 8:], 16, 4, 2), scales.flatten(1).view(torch.int8) - 32, _IQ4)
    return _super_blocks(matrix, _half(x, 0))


def _mxfp4(x: Tensor) -> QuantizedMatrix:
    scales = torch.ldexp(torch.ones_like(x[..., 0], dtype=torch.float32), x[..., 0].int() - 128)
    return _from_table(_fields(x[..., 1:], 16, 4, 2), scales, _E2M1_TWICE)


# By type: the dtype of a float, or the function from bytes [out, blocks, bytes of a block] to a matrix [out, in].
_DECODERS: dict[str, torch.dtype | Callable[[Tensor], QuantizedMatrix]] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "Q4_0": partial(_simple, bits=4, has_minimum=False),
    "Q4_1": partial(_simple, bits=4, has_minimum=True),
    "Q5_0": partial(_simple, bits=5, has_minimum=False),
    "Q5_1": partial(_simple, bits=5, has_minimum=True),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": partial(_q45_k, bits=4),
    "Q5_K": partial(_q45_k, bits=5),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def decode(kind: TensorType, data: Tensor) -> Piece:
    """data: bytes [out, bytes of a row] -> [out, in], still quantized."""
    decoder = _DECODERS[kind.name]
    if isinstance(decoder, torch.dtype):
        return data.contiguous().view(decoder)
    return decoder(data.view(len(data), -1, kind.nbytes))


def dequantize(kind: TensorType, data: Tensor) -> Tensor:
    """data: bytes [out, bytes of a row] -> floats [out, in]"""
    matrix = decode(kind, data)
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize()


@dataclass(frozen=True)
class GGUF(Scheme):
    """The scheme of GGUF files, whose tensors have different types. type_of: from a tensor's name to its type."""

    type_of: Callable[[str], TensorType]

    def __call__(self, builder: Builder, shape: LinearShape) -> LinearWeight:
        shape = replace(shape, transposed=False)
        if all(self.type_of(f"{part.name}.weight").is_float for part in shape.parts):
            return dense_weight(builder, shape)
        return super().__call__(builder, shape)

    def inputs_together(self, name: str) -> int:
        return self.type_of(f"{name}.weight").elements

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], Piece]:
        name = f"{part.name}.weight"
        kind = self.type_of(name)
        blocks = Groups.of(shape, kind.elements, divisible=False)
        columns = slice(blocks.picked.start * kind.nbytes, blocks.picked.stop * kind.nbytes)
        outputs = slice(part.start, part.stop)
        data = slot(builder, name, torch.uint8, (part.rows, blocks.count * kind.nbytes), outputs, columns)
        start, dtype = shape.start - blocks.picked.start * kind.elements, builder.dtype

        def make() -> Piece:
            piece = decode(kind, data)
            return piece.to(dtype) if isinstance(piece, Tensor) else _inputs(piece, start, shape.stop - shape.start)

        return make


def _inputs(matrix: QuantizedMatrix, start: int, count: int) -> QuantizedMatrix:
    """The inputs [start, start + count), of which the first may be in the middle of a group."""
    if matrix.in_features == count:
        return matrix
    group = math.gcd(matrix.group, start)
    index = torch.arange(start, start + count, group, device=matrix.codes.device) // matrix.group
    codes, offsets = matrix.single_codes()[:, start : start + count], matrix.effective_offsets()
    scales = matrix.effective_scales()[:, index]
    offsets = None if offsets is None else narrow(offsets[:, index])
    return replace(integer_matrix(codes, matrix.bits, scales, group, offsets=offsets), table=matrix.table)
