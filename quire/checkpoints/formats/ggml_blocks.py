"""Decodes further types of ggml's blocks: i-quants, four-bit floats, ternary weights, and codes of one and two bits.

The layouts are those of ggml's ggml-common.h. The values equal those of ggml's reference dequantization bit for bit.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from quire.checkpoints.errors import WeightError
from quire.checkpoints.formats.ggml_fields import Decoder, fields, half
from quire.checkpoints.formats.packing import integer_matrix, pack_pairs
from quire.ops.reference.quantized import QuantizedMatrix
from quire.platform.extras import install_command

_CHUNK = 2**22  # elements decoded at a time, since each takes a few bytes of temporary memory


def _in_parts(decoder: Decoder, x: Tensor) -> QuantizedMatrix:
    """Decode the rows in chunks. The decoder's results have the same dtypes for all rows."""
    step = max(1, _CHUNK // (x.shape[1] * 256))
    matrices = [decoder(x[start : start + step]) for start in range(0, max(1, len(x)), step)]
    first = matrices[0]
    joined = {name: torch.cat([matrix.by_row[name] for matrix in matrices]) for name in first.by_row}
    return replace(first, **joined)  # type: ignore[arg-type]


# ---- small integers


def _less_one(codes: Tensor, scales: Tensor) -> QuantizedMatrix:
    """weight = (code - 1) * scale. codes: [out, blocks, elements]; scales: [out, blocks]"""
    return integer_matrix(codes.flatten(1) + 7, 4, scales, codes.shape[2])


def _q1_0(x: Tensor) -> QuantizedMatrix:
    """A bit is the sign: 1 means d, 0 means -d."""
    return _less_one(fields(x[..., 2:], 1, 1, 8) * 2, half(x, 0))


def _q2_0(x: Tensor) -> QuantizedMatrix:
    return _less_one(fields(x[..., 2:], 1, 2, 4), half(x, 0))


def _tq2_0(x: Tensor) -> QuantizedMatrix:
    return _less_one(fields(x[..., :64], 32, 2, 4), half(x, 64))


def _tq1_0(x: Tensor) -> QuantizedMatrix:
    digits = [_trits(x[..., :32], 5), _trits(x[..., 32:48], 5), _trits(x[..., 48:52], 4)]
    return _less_one(torch.cat(digits, dim=-1), half(x, 52))


def _trits(x: Tensor, count: int) -> Tensor:
    """Return the first `count` base-3 digits of each byte, read as the fraction byte / 256. The first digits of all
    bytes come first, then the second digits. [..., bytes] -> [..., bytes * count]"""
    powers = 3 ** torch.arange(count, dtype=torch.uint8, device=x.device)[:, None]
    rest = x[..., None, :] * powers  # modulo 256
    return (rest.short() * 3 >> 8).to(torch.uint8).flatten(-2)


# ---- four-bit codes that index a table of values

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _from_table(codes: Tensor, scales: Tensor, table: tuple[int, ...]) -> QuantizedMatrix:
    """codes: [out, blocks, elements]; scales: [out, groups]"""
    codes = codes.flatten(1)
    return replace(integer_matrix(codes, 4, scales, codes.shape[1] // scales.shape[1]), table=table)


def _iq4_nl(x: Tensor) -> QuantizedMatrix:
    return _from_table(fields(x[..., 2:], 16, 4, 2), half(x, 0), _IQ4)


def _iq4_xs(x: Tensor) -> QuantizedMatrix:
    """Bytes 2 to 8 contain the scales of eight groups of 32 elements: their upper 2 bits, then their lower 4."""
    scales = fields(x[..., 4:8], 1, 4, 2) | fields(x[..., 2:4], 1, 2, 4) << 4
    matrix = _from_table(fields(x[..., 8:], 16, 4, 2), scales.flatten(1).view(torch.int8) - 32, _IQ4)
    return replace(matrix, factors=half(x, 0)[..., None])


def _mxfp4(x: Tensor) -> QuantizedMatrix:
    scales = torch.ldexp(torch.ones_like(x[..., 0], dtype=torch.float32), x[..., 0].int() - 128)
    return _from_table(fields(x[..., 1:], 16, 4, 2), scales.bfloat16(), _E2M1_TWICE)


def _nvfp4(x: Tensor) -> QuantizedMatrix:
    """Four groups of 16 elements, with unsigned float8 scales. ggml reads byte 127 as 0, and 255 as 480."""
    scales = (x[..., :4] & 127).view(torch.float8_e4m3fn).float().masked_fill(x[..., :4] == 127, 0).nan_to_num(480)
    return _from_table(fields(x[..., 4:], 8, 4, 2), scales.flatten(1).half() / 2, _E2M1_TWICE)


# ---- the other i-quants, whose groups of 8 or 4 neighbouring weights are the entries of a codebook

# Entries [..., n], a byte of signs for each 8 weights [..., 32], a scale for each group [..., groups], and their factor
_Layout = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]

_BITS = torch.arange(256)[:, None] >> torch.arange(8) & 1  # [bytes, 8]
_SIGNS = (_BITS * 8).to(torch.uint8).view(torch.int64)[:, 0]  # each bit of a byte as the highest of a code's four
# Seven signs, and an eighth that makes the number of minus signs even
_EVEN = torch.arange(128) | (_BITS[:128].sum(1) & 1) << 7


def _shifted(x: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Unpack the fields of each word. [..., words] -> [..., words * shifts]"""
    return (x[..., None] >> torch.tensor(shifts, dtype=x.dtype, device=x.device) & mask).flatten(-2)


def _words(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(dtype).int()  # the copy is aligned to words


def _seven_signs(index: Tensor) -> Tensor:
    return _EVEN.to(index.device)[index]


def _iq2_xxs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups = x[..., 2:].reshape(*x.shape[:2], 8, 8)  # four entries, and a word
    words = _words(groups[..., 4:], torch.int32)[..., 0]
    return groups[..., :4].flatten(-2), *_of_words(words), half(x, 0)


def _iq3_xxs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x[..., 2:66], *_of_words(_words(x[..., 66:], torch.int32)), half(x, 0)


def _of_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signs and the scale of 32 weights, from a 32-bit word."""
    return _seven_signs(_shifted(words, (0, 7, 14, 21), 127)), words >> 28 & 15


def _iq2_xs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    words = _words(x[..., 2:66], torch.int16)
    return words & 511, _seven_signs(words >> 9 & 127), fields(x[..., 66:], 1, 4, 2), half(x, 0)


def _iq2_s(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = x[..., 2:34] | fields(x[..., 66:74], 1, 2, 4).int() << 8
    return index, x[..., 34:66], fields(x[..., 74:], 1, 4, 2), half(x, 0)


def _iq3_s(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = x[..., 2:66] | fields(x[..., 66:74], 1, 1, 8).int() << 8
    return index, x[..., 74:106], fields(x[..., 106:], 1, 4, 2), half(x, 0)


def _iq1_s(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    words = _words(x[..., 34:], torch.int16)
    index = x[..., 2:34] | _shifted(words, (0, 3, 6, 9), 7) << 8
    return index, (words >> 15 & 1).repeat_interleave(4, -1) * 255, words >> 12 & 7, half(x, 0)


def _iq1_m(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read the factor from the highest four bits of four 16-bit words."""
    high = fields(x[..., 32:48], 1, 4, 2)
    words = _words(x[..., 48:], torch.int16)
    quarters = x[..., 49::2] >> 4
    factor = half(quarters[..., ::2] | quarters[..., 1::2] << 4, 0)
    return x[..., :32] | (high & 7).int() << 8, (high >> 3) * 255, _shifted(words, (0, 3, 6, 9), 7), factor


_SHIFT = 0.125  # of a group of IQ1's -1, 0 and 1, up or down

# For each type, the layout, and the factor that converts the codebook's values to those of the table. The factor is
# None for IQ1, whose "signs" shift a group up or down. Scales are odd integers.
_LAYOUTS: dict[str, tuple[_Layout, float | None]] = {
    "IQ1_S": (_iq1_s, None),
    "IQ1_M": (_iq1_m, None),
    "IQ2_XXS": (_iq2_xxs, 0.125),
    "IQ2_XS": (_iq2_xs, 0.125),
    "IQ2_S": (_iq2_s, 0.125),
    "IQ3_XXS": (_iq3_xxs, 0.25),
    "IQ3_S": (_iq3_s, 1.0),
}


@cache
def _codebook(name: str) -> tuple[Tensor, tuple[float, ...]]:
    """Return the entries [count], each with 8 or 4 one-byte codes in one integer, and the values of the codes [16],
    whose second half has the opposite sign. Raises WeightError without the gguf package."""
    try:
        from gguf import quants
    except ImportError as error:
        message = f"tensors of GGUF's type {name} need ggml's codebooks, which the package gguf has"
        raise WeightError(f"{message}: {install_command('gguf')}") from error
    source = getattr(quants, name)
    source.init_grid()
    values, codes = torch.unique(torch.from_numpy(source.grid)[0, 0], return_inverse=True)
    entries = codes.to(torch.uint8).view(torch.int64 if codes.shape[1] == 8 else torch.int32)[:, 0]
    unit = _LAYOUTS[name][1]
    table = torch.zeros(2, 8)
    halves = (values + _SHIFT, values - _SHIFT) if unit is None else (values * unit, -values * unit)
    table[:, : len(values)] = torch.stack(halves)
    return entries, tuple(table.flatten().tolist())


def _i_quant(name: str, x: Tensor) -> QuantizedMatrix:
    entries, table = _codebook(name)
    index, signs, scales, factors = _LAYOUTS[name][0](x)
    codes = entries.to(x.device)[index.int()].view(torch.uint8) | _SIGNS.to(x.device)[signs.int()].view(torch.uint8)
    packed = pack_pairs(codes.flatten(1))
    scales = (scales * 2 + 1).to(torch.uint8).flatten(1)
    width = x.shape[1] * 256
    return QuantizedMatrix(packed, scales, width // scales.shape[1], width, factors=factors[..., None], table=table)


_OTHERS: dict[str, Decoder] = {
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}


def decoder_of(name: str) -> Decoder:
    """Return the decoder of a type. Raises WeightError if it needs codebooks and the gguf package is not installed."""
    if name in _LAYOUTS:
        _codebook(name)
        return partial(_in_parts, partial(_i_quant, name))
    return partial(_in_parts, _OTHERS[name])
