"""The encoding of vectors: as numbers, or as bytes of a type and a byte order."""

import base64
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]
EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]


def raw(values: Values, dtype: EmbedDType, endianness: Endianness) -> bytes:
    """Return the values as consecutive bytes, rounded to the nearest value of the type."""
    numbers: npt.NDArray[Any]
    if dtype == "float32":
        numbers = np.ascontiguousarray(values, np.float32)
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            numbers = values.astype(np.float16)
    elif dtype == "bfloat16":
        numbers = _bfloat16(values)
    else:
        numbers = _float8(values, dtype)
    is_native = endianness in ("native", sys.byteorder)
    return (numbers if is_native else numbers.byteswap()).tobytes()


def encoded(
    values: Values, encoding: str | None, dtype: EmbedDType = "float32", endianness: Endianness = "little"
) -> list[Any] | str:
    """encoding: base64; otherwise a list of numbers."""
    if encoding == "base64":
        return base64.b64encode(raw(values, dtype, endianness)).decode()
    numbers: list[Any] = values.tolist()
    return numbers


def bits(values: Values, signed: bool) -> list[int]:
    """Return one bit per number, 1 unless it is negative, packed into 8-bit integers with the first bit highest.
    signed: 128 is subtracted from each integer."""
    packed = np.packbits(values >= 0).astype(np.int16)
    numbers: list[int] = (packed - 128 if signed else packed).tolist()
    return numbers


def places(vectors: Sequence[Values], parts: Sequence[bytes], dtype: str, endianness: str) -> list[dict[str, Any]]:
    """Return the location of each vector in a body of bytes."""
    found = []
    start = 0
    for index, (values, part) in enumerate(zip(vectors, parts, strict=True)):
        end = start + len(part)
        found.append(
            {
                "index": index,
                "embed_dtype": dtype,
                "endianness": endianness,
                "start": start,
                "end": end,
                "shape": list(values.shape),
            }
        )
        start = end
    return found


def _bfloat16(values: Values) -> npt.NDArray[np.uint16]:
    """Return the upper halves of the floats, rounded to even."""
    whole = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16)


@cache
def _float8_values(dtype: str) -> tuple[npt.NDArray[np.float64], int]:
    """Return (the finite values of the codes without a sign, the code for larger values)."""
    bits_of_fraction, bias, last, above = (3, 7, 0x7E, 0x7E) if dtype == "fp8_e4m3" else (2, 15, 0x7B, 0x7C)
    codes = np.arange(last + 1)
    exponent = codes >> bits_of_fraction
    fraction = (codes & ((1 << bits_of_fraction) - 1)) / (1 << bits_of_fraction)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return values, above


def _float8(values: Values, dtype: str) -> npt.NDArray[np.uint8]:
    known, above = _float8_values(dtype)
    step = known[-1] - known[-2]
    middles = np.append((known[1:] + known[:-1]) / 2, known[-1] + step / 2)
    sizes = np.abs(values.astype(np.float64))
    codes = np.searchsorted(middles, sizes)
    ties = sizes == middles[np.minimum(codes, len(middles) - 1)]
    codes += ties & (codes % 2 == 1)
    codes = np.where(codes < len(known), codes, above)
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
