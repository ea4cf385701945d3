"""MXFP4, as gpt-oss keeps its experts: OCP Microscaling Formats 1.0, blocks of 32 values with a power of two."""

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks: uint8 [..., out, groups, 16], two values a byte, the first in its low half; scales: uint8 [..., out,
    groups], exponents plus 127 -> [..., out, groups * 32], bfloat16, which holds the values exactly."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)])
    values = table[torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()]
    return torch.ldexp(values, scales[..., None].int() - 127).flatten(-2).to(torch.bfloat16)
