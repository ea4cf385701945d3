"""What a cache of one byte an element holds: the definition, which every backend follows bit by bit.

A token's key in one head becomes as many cells and one scale in float32, so that key = cells * scale; its value
likewise. The scale makes the largest element the largest number that a cell can hold. It is a function of the token
alone: whatever else is stored, and whenever, equal tokens are equal bytes. fp8 has scales too, unlike vLLM's: with them
no element is out of range or lost below the smallest number, whatever the model.
"""

import torch
from torch import Tensor

CELLS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # by their names in kv_cache_dtype
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE_BYTES = 4


def quantize(x: Tensor, cell: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: [..., dim] -> cells: [..., dim], rounded to nearest (ties to even); scale: [...] in float32"""
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST[cell]).clamp(min=torch.finfo(torch.float32).tiny)
    cells = x / scale[..., None]
    return (cells.round() if cell is torch.int8 else cells).to(cell), scale


def to_bytes(x: Tensor, cell: torch.dtype) -> Tensor:
    """x: [..., dim] -> [..., dim + SCALE_BYTES], uint8: the cells, then their scale"""
    cells, scale = quantize(x, cell)
    return torch.cat([cells.view(torch.uint8), scale[..., None].view(torch.uint8)], dim=-1)


def from_bytes(stored: Tensor, cell: torch.dtype) -> Tensor:
    """What `to_bytes` made: [..., dim + SCALE_BYTES] -> [..., dim] in float32"""
    cells, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    scale = scale.clone(memory_format=torch.contiguous_format)  # aligned
    return cells.view(cell).float() * scale.view(torch.float32)
