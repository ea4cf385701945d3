"""Low-rank adapters of linear layers (LoRA, arXiv:2106.09685). Each token may use a different adapter."""

from itertools import pairwise

import torch
from torch import Tensor

from quire.ops.registry import declare


@declare
def add_lora(out: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, ranks: Tensor, bounds: Tensor) -> Tensor:
    """Add its adapter's outputs, B A x, to each token's outputs. Writes to `out` and returns it.

    out: [tokens, outs] and x: [tokens, in], whose last dimension is contiguous; a: [slots, parts, rank, in] and b:
    [slots, rank, outs], contiguous and of the type of x; the scale is in b. slots: [tokens], int64, the slot of a
    token's adapter, or -1 for none, which leaves its outputs unchanged. ranks: [slots], int64, the rank of each slot's
    adapter, which may be lower than that of a and b, or 0. bounds: [parts + 1], int64: outputs bounds[p] up to bounds[p
    + 1] belong to part p, which has its own matrix A (such as q, k and v in a fused product). The sums are in float32,
    and rounded once.
    """
    ends = bounds.tolist()
    of_slots = ranks.tolist()
    for slot in sorted({*slots.tolist()}):
        rank = of_slots[slot] if slot >= 0 else 0
        if not rank:
            continue
        rows = (slots == slot).nonzero()[:, 0]
        given = x[rows].float()
        added = [
            given @ a[slot, part, :rank].float().T @ b[slot, :rank, start:stop].float()
            for part, (start, stop) in enumerate(pairwise(ends))
        ]
        out[rows] = (out[rows].float() + torch.cat(added, dim=1)).to(out.dtype)
    return out
