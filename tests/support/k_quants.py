"""ggml's K-quants, written as its comments describe the blocks of 256 weights.

Rounding is plain. llama.cpp's own quantizer searches for better scales, but the meaning of the bytes is the same.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from support.ggml_blocks import RANDOM, random_blocks

Array = np.ndarray


def half(values: Array) -> Array:
    """[blocks] -> bytes [blocks, 2]"""
    return values.astype(np.float16)[:, None].view(np.uint8)


def exact(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


def divided(values: Array, by: Array) -> Array:
    return np.divide(values, by, out=np.zeros(np.broadcast_shapes(values.shape, by.shape), np.float32), where=by != 0)


def with_minima(blocks: Array, group: int, bits: int, scale_bits: int) -> tuple[Array, Array, Array, Array, Array]:
    """weight = d * scale * code - dmin * minimum -> codes [n, 256], scales, minima [n, groups], d, dmin [n]"""
    x = blocks.reshape(len(blocks), -1, group)
    minima = np.maximum(-x.min(-1), 0)
    scales = (x.max(-1) + minima) / (2**bits - 1)
    top = 2**scale_bits - 1
    d, dmin = exact(scales.max(-1) / top), exact(minima.max(-1) / top)
    sc = np.clip(np.round(divided(scales, d[:, None])), 0, top)
    mn = np.clip(np.round(divided(minima, dmin[:, None])), 0, top)
    codes = np.round(divided(x + (dmin[:, None] * mn)[..., None], (d[:, None] * sc)[..., None]))
    codes = np.clip(codes, 0, 2**bits - 1).astype(np.uint8)
    return codes.reshape(len(blocks), 256), sc.astype(np.uint8), mn.astype(np.uint8), d, dmin


def around_zero(blocks: Array, bits: int, scale_bits: int) -> tuple[Array, Array, Array]:
    """weight = d * scale * (code - 2^(bits - 1)), groups of 16 -> codes [n, 256], scales [n, 16], d [n]"""
    x, middle = blocks.reshape(len(blocks), -1, 16), 2 ** (bits - 1)
    scales = np.abs(x).max(-1) / (middle - 1)
    top = 2 ** (scale_bits - 1) - 1
    d = exact(scales.max(-1) / top)
    sc = np.clip(np.round(divided(scales, d[:, None])), -top, top)
    codes = np.round(divided(x, (d[:, None] * sc)[..., None])) + middle
    return np.clip(codes, 0, 2 * middle - 1).astype(np.uint8).reshape(len(blocks), 256), sc.astype(np.int8), d


def q2_k(blocks: Array) -> Array:
    codes, sc, mn, d, dmin = with_minima(blocks, 16, 2, 4)
    qs = np.zeros((len(blocks), 64), np.uint8)
    for i in range(256):  # 32 bytes hold 128 weights: the first 32 in their lowest bits, the next 32 above these, ...
        qs[:, i // 128 * 32 + i % 32] |= codes[:, i] << (i % 128 // 32 * 2)
    return np.concatenate([sc | mn << 4, qs, half(d), half(dmin)], axis=1)


def q3_k(blocks: Array) -> Array:
    codes, sc, d = around_zero(blocks, 3, 6)
    high, low = np.zeros((len(blocks), 32), np.uint8), np.zeros((len(blocks), 64), np.uint8)
    for i in range(256):
        high[:, i % 32] |= (codes[:, i] >> 2) << (i // 32)
        low[:, i // 128 * 32 + i % 32] |= (codes[:, i] & 3) << (i % 128 // 32 * 2)
    stored, packed = (sc + 32).astype(np.uint8), np.zeros((len(blocks), 12), np.uint8)
    for g in range(16):
        packed[:, g % 8] |= (stored[:, g] & 15) << (g // 8 * 4)
        packed[:, 8 + g % 4] |= (stored[:, g] >> 4) << (g // 4 * 2)
    return np.concatenate([high, low, packed, half(d)], axis=1)


def six_bit_pairs(sc: Array, mn: Array) -> Array:
    """Eight scales and eight minima of six bits in 12 bytes."""
    packed = np.zeros((len(sc), 12), np.uint8)
    for g in range(4):
        packed[:, g] = sc[:, g] | (sc[:, g + 4] >> 4) << 6
        packed[:, g + 4] = mn[:, g] | (mn[:, g + 4] >> 4) << 6
        packed[:, g + 8] = sc[:, g + 4] & 15 | (mn[:, g + 4] & 15) << 4
    return packed


def q45_k(blocks: Array, bits: int) -> Array:
    codes, sc, mn, d, dmin = with_minima(blocks, 32, bits, 6)
    high, low = np.zeros((len(blocks), 32), np.uint8), np.zeros((len(blocks), 128), np.uint8)
    for i in range(256):
        low[:, i // 64 * 32 + i % 32] |= (codes[:, i] & 15) << (i % 64 // 32 * 4)
        high[:, i % 32] |= (codes[:, i] >> 4) << (i // 32)
    return np.concatenate([half(d), half(dmin), six_bit_pairs(sc, mn), *([high] if bits == 5 else []), low], axis=1)


def q6_k(blocks: Array) -> Array:
    codes, sc, d = around_zero(blocks, 6, 8)
    low, high = np.zeros((len(blocks), 128), np.uint8), np.zeros((len(blocks), 64), np.uint8)
    for i in range(256):
        low[:, i // 128 * 64 + i % 64] |= (codes[:, i] & 15) << (i % 128 // 64 * 4)
        high[:, i // 128 * 32 + i % 32] |= (codes[:, i] >> 4) << (i % 128 // 32 * 2)
    return np.concatenate([low, high, sc.view(np.uint8), half(d)], axis=1)


IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def iq4_codes(blocks: Array, steps: Array) -> Array:
    """Blocks [n, 32] in units of steps [n], as codes in bytes [n, 16]: the first half of a block in the low halves."""
    codes = np.abs(divided(blocks, steps[:, None])[..., None] - IQ4).argmin(-1).astype(np.uint8)
    return codes[:, :16] | codes[:, 16:] << 4


def iq4_nl(blocks: Array) -> Array:
    d = exact(np.abs(blocks).max(-1) / 113)
    return np.concatenate([half(d), iq4_codes(blocks, d)], axis=1)


def iq4_xs(blocks: Array) -> Array:
    x = blocks.reshape(len(blocks), 8, 32)
    scales = np.abs(x).max(-1) / 113
    d = exact(scales.max(-1) / 31)
    sc = np.clip(np.round(divided(scales, d[:, None])), 0, 31)
    stored = (sc + 32).astype(np.uint8)
    low, high = np.zeros((len(x), 4), np.uint8), np.zeros((len(x), 2), np.uint8)
    for g in range(8):
        low[:, g // 2] |= (stored[:, g] & 15) << (g % 2 * 4)
        high[:, g // 4] |= (stored[:, g] >> 4) << (g % 4 * 2)
    codes = iq4_codes(x.reshape(-1, 32), (d[:, None] * sc).reshape(-1)).reshape(len(x), 128)
    return np.concatenate([half(d), high, low, codes], axis=1)


WRITERS: dict[Type, Callable[[Array], Array]] = {
    Type.Q2_K: q2_k,
    Type.Q3_K: q3_k,
    Type.Q4_K: lambda blocks: q45_k(blocks, 4),
    Type.Q5_K: lambda blocks: q45_k(blocks, 5),
    Type.Q6_K: q6_k,
    Type.IQ4_NL: iq4_nl,
    Type.IQ4_XS: iq4_xs,
}


def quantize(values: Array, kind: Type) -> Array:
    """Like `gguf.quants.quantize`, which lacks some types: floats [..., in] -> bytes [..., bytes of a row]. Blocks of
    the types in RANDOM have the size of the floats only."""
    if kind.name in RANDOM:
        return random_blocks(np.ascontiguousarray(values, np.float32), kind)
    if kind not in WRITERS:
        return gguf.quants.quantize(values, kind)
    blocks = WRITERS[kind](np.ascontiguousarray(values, np.float32).reshape(-1, gguf.GGML_QUANT_SIZES[kind][0]))
    return blocks.reshape(*values.shape[:-1], -1)
