"""Decodes the tensor types of GGUF files (ggml's quantized blocks) into the engine's own layout.

The layouts are those of ggml's ggml-common.h. The values equal those of ggml's reference dequantization bit for bit.
Types whose codes index a table of values, and the less common ones, are in ggml_blocks.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.checkpoints.formats.ggml_fields import Decoder, fields, half
from quire.checkpoints.formats.gguf_types import TensorType
from quire.checkpoints.formats.packing import integer_matrix, narrow
from quire.checkpoints.formats.scheme import Groups, Piece, Scheme, slot
from quire.layers.build import Builder
from quire.layers.linear import LinearShape, LinearWeight, dense_weight
from quire.layers.specs import OutputPart
from quire.ops.cpu.gguf_blocks import can_decode, decode_blocks
from quire.ops.reference.quantized import QuantizedMatrix


def _matrix(codes: Tensor, bits: int, scales: Tensor, offsets: Tensor | None = None) -> QuantizedMatrix:
    """codes: [out, blocks, elements]; scales, offsets: [out, groups]. Without offsets, code 2^(bits - 1) means 0."""
    codes = codes.flatten(1)
    return integer_matrix(codes, bits, scales, codes.shape[1] // scales.shape[1], offsets=offsets)


def _simple(x: Tensor, bits: int, has_minimum: bool) -> QuantizedMatrix:
    """Q4_0, Q4_1, Q5_0, Q5_1. A block contains d, m (if has_minimum), the fifth bits (if bits == 5), and 4 bits for
    each of 32 elements."""
    start = 4 if has_minimum else 2  # offset of the fifth bits
    codes = fields(x[..., -16:], 16, 4, 2)
    if bits == 5:
        codes = codes | fields(x[..., start : start + 4], 1, 1, 8) << 4
    return _matrix(codes, bits, half(x, 0), half(x, 2) if has_minimum else None)


def _q8_0(x: Tensor) -> QuantizedMatrix:
    return _matrix(x[..., 2:] ^ 128, 8, half(x, 0))


def _super_blocks(matrix: QuantizedMatrix, *factors: Tensor) -> QuantizedMatrix:
    return replace(matrix, factors=torch.stack(factors, dim=-1))


def _q2_k(x: Tensor) -> QuantizedMatrix:
    scales = x[..., :16].flatten(1)
    codes = fields(x[..., 16:80], 32, 2, 4)
    return _super_blocks(_matrix(codes, 2, scales & 15, scales >> 4), half(x, 80), -half(x, 82))


def _q3_k(x: Tensor) -> QuantizedMatrix:
    codes = fields(x[..., 32:96], 32, 2, 4) | fields(x[..., :32], 32, 1, 8) << 2
    scales = fields(x[..., 96:104], 8, 4, 2) | fields(x[..., 104:108], 4, 2, 4) << 4
    return _super_blocks(_matrix(codes, 3, scales.flatten(1).view(torch.int8) - 32), half(x, 108))


def _q45_k(x: Tensor, bits: int) -> QuantizedMatrix:
    """Q4_K, Q5_K: eight groups of 32 elements. Bytes 4 to 16 contain their 6-bit scales and minima. Those of the last
    four groups are split into two parts."""
    low = x[..., 4:8]
    minimum = x[..., 8:12]
    mixed = x[..., 12:16]
    scales = torch.cat([low & 63, mixed & 15 | low >> 2 & 48], dim=-1)
    minima = torch.cat([minimum & 63, mixed >> 4 | minimum >> 2 & 48], dim=-1)
    codes = fields(x[..., -128:], 32, 4, 2)
    if bits == 5:
        codes = codes | fields(x[..., 16:48], 32, 1, 8) << 4
    return _super_blocks(_matrix(codes, bits, scales.flatten(1), minima.flatten(1)), half(x, 0), -half(x, 2))


def _q6_k(x: Tensor) -> QuantizedMatrix:
    codes = fields(x[..., :128], 64, 4, 2) | fields(x[..., 128:192], 32, 2, 4) << 4
    scales = x[..., 192:208].flatten(1).view(torch.int8)
    return _super_blocks(_matrix(codes, 6, scales), half(x, 208))


# From bytes [out, blocks, bytes of a block] to a matrix [out, in].

# By type: the dtype of a float, or the decoder.
_DECODERS: dict[str, torch.dtype | Decoder] = {
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
}


def decoder_of(kind: TensorType) -> torch.dtype | Decoder:
    """Raises WeightError if the type needs a package that is not installed."""
    if (known := _DECODERS.get(kind.name)) is not None:
        return known
    from quire.checkpoints.formats.ggml_blocks import decoder_of

    further: Decoder = decoder_of(kind.name)
    return further


def decode(kind: TensorType, data: Tensor) -> Piece:
    """data: bytes [out, bytes of a row] -> [out, in], still quantized."""
    decoder = decoder_of(kind)
    if isinstance(decoder, torch.dtype):
        return data.contiguous().view(decoder)
    blocks = data.view(len(data), -1, kind.nbytes)
    return decode_blocks(kind.name, blocks) if can_decode(kind.name, data) else decoder(blocks)


def dequantize(kind: TensorType, data: Tensor) -> Tensor:
    """data: bytes [out, bytes of a row] -> floats [out, in]"""
    matrix = decode(kind, data)
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize()


def _scaled(piece: Piece, scale: float) -> Piece:
    if scale == 1:
        return piece
    if isinstance(piece, Tensor):
        return piece.float() * scale
    factors = piece.scales.new_ones(piece.out_features, 1, 2) if piece.factors is None else piece.factors
    return replace(piece, factors=factors.float() * scale)


@dataclass(frozen=True)
class GGUF(Scheme):
    """The scheme of GGUF files, whose tensors have different types.

    type_of: maps a tensor's name to its type. scale_of: maps it to the factor of its values.
    """

    has_tables = True
    type_of: Callable[[str], TensorType]
    scale_of: Callable[[str], float]

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
        decoder_of(kind)  # raises an error before anything is read
        blocks = Groups.of(shape, kind.elements, divisible=False)
        columns = slice(blocks.picked.start * kind.nbytes, blocks.picked.stop * kind.nbytes)
        outputs = slice(part.start, part.stop)
        data = slot(builder, name, torch.uint8, (part.rows, blocks.count * kind.nbytes), outputs, columns)
        start = shape.start - blocks.picked.start * kind.elements
        dtype = builder.dtype

        def make() -> Piece:
            piece = _scaled(decode(kind, data), self.scale_of(name))
            return piece.to(dtype) if isinstance(piece, Tensor) else _inputs(piece, start, shape.stop - shape.start)

        return make


def _inputs(matrix: QuantizedMatrix, start: int, count: int) -> QuantizedMatrix:
    """Return the inputs [start, start + count). The first may be in the middle of a group."""
    if matrix.in_features == count:
        return matrix
    group = math.gcd(matrix.group, start)
    index = torch.arange(start, start + count, group, device=matrix.codes.device) // matrix.group
    codes = matrix.single_codes()[:, start : start + count]
    offsets = matrix.effective_offsets()
    scales = matrix.effective_scales()[:, index]
    offsets = None if offsets is None else narrow(offsets[:, index])
    return replace(integer_matrix(codes, matrix.bits, scales, group, offsets=offsets), table=matrix.table)
