"""Reads the fields of ggml's blocks: codes of a few bits, and scales in float16."""

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.reference.quantized import QuantizedMatrix

Decoder = Callable[[Tensor], QuantizedMatrix]  # from the bytes of blocks, [rows, bytes]


def fields(x: Tensor, run: int, bits: int, count: int) -> Tensor:
    """Unpack `count` fields of `bits` bits from each byte. [..., bytes] -> [..., bytes * count]

    Of each `run` bytes, the lowest fields of all bytes come first, then the next fields of all bytes.
    """
    shifts = torch.arange(0, bits * count, bits, dtype=torch.uint8, device=x.device)[:, None]
    return (x.reshape(*x.shape[:-1], -1, 1, run) >> shifts & ((1 << bits) - 1)).flatten(-3)


def half(x: Tensor, offset: int) -> Tensor:
    """Return the float16 at byte `offset` of each block: [out, blocks]"""
    return x[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0]
