"""The first RWKV-7 checkpoints of flash-linear-attention, which pack six tensors of a layer into one tensor."""

from dataclasses import replace

from torch import Tensor

from quire.checkpoints.weights import Checkpoint, check_shape
from quire.layers.build import WeightSlot

PACKED = ".attn.x_x"


class RwkvCheckpoint(Checkpoint):
    """Presents the rows of a tensor `....attn.x_x` as `....attn.x_r`, `x_w`, `x_k`, `x_v`, `x_a` and `x_g`."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.names: dict[str, tuple[str, int | None]] = {name: (name, None) for name in inner.names}
        for name in filter(lambda name: name.endswith(PACKED), inner.names):
            del self.names[name]
            self.names.update({name[:-1] + key: (name, row) for row, key in enumerate("rwkvag")})

    def read(self, slot: WeightSlot) -> Tensor:
        name, row = self.names[slot.name]
        if row is None:
            return self.inner.read(slot)
        part = self.inner.read(WeightSlot(name, slot.target, self.inner.shape(name)))[row].view(1, -1)
        check_shape(slot, part.shape)
        return part[slot.pick]

    def copy_into(self, slot: WeightSlot) -> None:
        name, row = self.names[self.alias(slot.name)]
        if row is None:
            self.inner.copy_into(replace(slot, name=name))
        else:
            super().copy_into(slot)
