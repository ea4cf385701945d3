"""The formats of caches whose elements have fewer bits than the model's tensors. Every backend follows these
definitions bit by bit.

With one byte per element, a token's key is stored in each head as one cell per element and one float32 scale, with
key = cells * scale. Values are stored in the same way. The scale maps the largest element to the largest number that a
cell can hold. It depends on the token alone, so equal tokens are always stored as equal bytes. Unlike in vLLM, fp8
cells have scales too, so no element overflows or underflows in any model.

A float32 model can also store float16, without scales. Finite numbers beyond its range become the largest ones.
"""

import torch
from torch import Tensor

CELLS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # by name in kv_cache_dtype
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE_BYTES = 4


def quantize(x: Tensor, cell: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: [..., dim] -> cells: [..., dim], rounded to nearest (ties to even); scale: [...] in float32"""
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST[cell]).clamp(min=torch.finfo(torch.float32).tiny)
    cells = x / scale[..., None]
    return (cells.round() if cell is torch.int8 else cells).to(cell), scale


def vector_bytes(dim: int, cell: torch.dtype) -> int:
    """Return the bytes of a token's key or value in a head."""
    return dim * cell.itemsize + (0 if cell is torch.float16 else SCALE_BYTES)


def to_bytes(x: Tensor, cell: torch.dtype) -> Tensor:
    """x: [..., dim] -> [..., vector_bytes], uint8: the cells, then their scale if they have one"""
    if cell is torch.float16:
        largest = torch.finfo(cell).max
        return torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(cell).view(torch.uint8)
    cells, scale = quantize(x, cell)
    return torch.cat([cells.view(torch.uint8), scale[..., None].view(torch.uint8)], dim=-1)


def from_bytes(stored: Tensor, cell: torch.dtype) -> Tensor:
    """The inverse of `to_bytes`: [..., vector_bytes] -> [..., dim] in float32"""
    if cell is torch.float16:
        return stored.view(cell).float()
    cells = stored[..., :-SCALE_BYTES]
    scale = stored[..., -SCALE_BYTES:]
    scale = scale.clone(memory_format=torch.contiguous_format)  # aligned
    return cells.view(cell).float() * scale.view(torch.float32)
