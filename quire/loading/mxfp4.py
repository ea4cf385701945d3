"""MXFP4, the format of gpt-oss's experts (OCP Microscaling Formats 1.0): 32 values share a scale, a power of two."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.layers.build import WeightSlot
from quire.loading.weights import Checkpoint

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode to bfloat16 [..., out, groups * 32], which holds the values exactly.

    blocks: uint8 [..., out, groups, 16], with two values in a byte, the first in its low half. scales: uint8 [..., out,
    groups], exponents plus 127.
    """
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)])
    values = table[torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()]
    return torch.ldexp(values, scales[..., None].int() - 127).flatten(-2).to(torch.bfloat16)


class Mxfp4Checkpoint(Checkpoint):
    """Decodes the tensors [experts, in, out] that another checkpoint stores as `..._blocks` and `..._scales`."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.names = {n.removesuffix("_blocks"): n for n in inner.names if not n.endswith("_scales")}

    def read(self, slot: WeightSlot) -> Tensor:
        if slot.name in self.inner.names:
            return self.inner.read(slot)
        experts, inputs, outputs = slot.shape
        groups, part = inputs // 32, torch.empty(slot.target.shape, dtype=torch.bfloat16)
        picked_experts = range(experts)[slot.pick[0]] if slot.pick else range(experts)
        for index, e in enumerate(
            picked_experts
        ):  # one at a time: decoding takes several times the memory of the result
            expert = (slice(e, e + 1),)
            blocks = replace(slot, name=f"{slot.name}_blocks", shape=(experts, outputs, groups, 16), pick=expert)
            scales = replace(slot, name=f"{slot.name}_scales", shape=(experts, outputs, groups), pick=expert)
            dense = decode_mxfp4(self.inner.read(blocks), self.inner.read(scales)).transpose(1, 2)
            picked = dense[0][slot.pick[1:]]
            part[index] = picked.T if slot.transposed else picked
        return part.transpose(1, 2) if slot.transposed else part
