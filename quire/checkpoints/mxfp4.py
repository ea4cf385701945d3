"""Presents gpt-oss's MXFP4 experts under the tensor names of compressed-tensors."""

from dataclasses import replace

from torch import Tensor

from quire.checkpoints.weights import Checkpoint
from quire.layers.build import WeightSlot


class Mxfp4Checkpoint(Checkpoint):
    """Presents the tensors `..._blocks` and `..._scales` as `....weight_packed` and `....weight_scale`."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.names = {_presented(name): name for name in inner.names}

    def read(self, slot: WeightSlot) -> Tensor:
        return self.inner.read(replace(slot, name=self.names[slot.name]))

    def copy_into(self, slot: WeightSlot) -> None:
        self.inner.copy_into(replace(slot, name=self.names[self.alias(slot.name)]))


def _presented(name: str) -> str:
    for end, other in (("_blocks", ".weight_packed"), ("_scales", ".weight_scale")):
        if name.endswith(end):
            return name.removesuffix(end) + other
    return name
