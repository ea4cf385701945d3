"""Random blocks of the types of ggml that no package writes, and what blocks of any type mean."""

from __future__ import annotations

import hashlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

Array = np.ndarray

RANDOM = "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S NVFP4 Q1_0".split()
HALVES = {  # where a block has float16 numbers
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "NVFP4": [],
    "IQ1_S": [0], "IQ1_M": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0],
    "TQ1_0": [52], "TQ2_0": [64], "Q1_0": [0], "Q2_0": [0],
}  # fmt: skip


def set_factors(blocks: Array, name: str, factors: Array) -> None:
    """Write the factors of blocks, in place. blocks: [..., bytes]; factors: [...]"""
    halves = factors.astype(np.float16)[..., None].view(np.uint8)
    for at in HALVES[name]:
        blocks[..., at : at + 2] = halves
    if name == "IQ1_M":  # the highest four bits of four words
        for i in range(4):
            quarter = halves[..., i // 2] >> i % 2 * 4 & 15
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | quarter << 4


def meaning(data: Array, name: str) -> Array:
    """Bytes [..., bytes of a row] -> float32 [..., in], as the gguf package reads them or, where it cannot, as ggml's
    pull requests 21273 and 24448 describe the blocks."""
    if name not in ("Q1_0", "Q2_0"):
        made: Array = gguf.quants.dequantize(data, Type[name])
        return made
    blocks = data.reshape(-1, 18)
    values = np.zeros((len(blocks), 128 if name == "Q1_0" else 64), np.float32)
    for block, row in zip(blocks, values, strict=True):
        d = np.float32(block[:2].view(np.float16)[0])
        for i in range(len(row)):
            if name == "Q1_0":
                row[i] = d if block[2 + i // 8] >> i % 8 & 1 else -d
            else:
                row[i] = d * np.float32(int(block[2 + i // 4] >> i % 4 * 2 & 3) - 1)
    return values.reshape(*data.shape[:-1], -1)


def random_blocks(values: Array, kind: Type) -> Array:
    """Blocks that are as large as the values on average, and random apart from that: [..., in] -> [..., bytes of a
    row]. Equal values give equal blocks, since writers may have rows in another order."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    wanted = values.reshape(-1, elements)
    drawn = b"".join(hashlib.shake_128(block.tobytes()).digest(size) for block in wanted)
    blocks = np.frombuffer(bytearray(drawn), np.uint8).reshape(-1, size)
    if kind.name == "NVFP4":
        blocks[:, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(wanted.reshape(-1, 4, 16)).max(-1) / 6)
        return blocks.reshape(*values.shape[:-1], -1)
    set_factors(blocks, kind.name, np.ones(len(blocks)))
    sizes = np.sqrt(np.square(meaning(blocks, kind.name)).mean(-1))
    set_factors(blocks, kind.name, np.sqrt(np.square(wanted).mean(-1)) / sizes)
    return blocks.reshape(*values.shape[:-1], -1)
