"""Checkpoints whose head is normed when it is loaded (norm_head in the config of a BailingMoE)."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from quire.checkpoints.weights import Checkpoint
from quire.layers.build import WeightSlot
from quire.layers.linear import LinearMethod

_HEAD = "lm_head.weight"
_LEAST = 1e-7  # length


class NormedHeadCheckpoint(Checkpoint):
    """Presents the columns of the head, [vocab, hidden], with length 1."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.names = inner.names

    def read(self, slot: WeightSlot) -> Tensor:
        part = self.inner.read(slot)
        if slot.name != _HEAD:
            return part
        whole = self.inner.read(replace(slot, pick=())).float()
        normed: Tensor = part.float() / whole.norm(dim=0).clamp(min=_LEAST)
        return normed.to(part.dtype)

    def copy_into(self, slot: WeightSlot) -> None:
        copy = super().copy_into if slot.name == _HEAD else self.inner.copy_into
        copy(slot)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def linear_method(self) -> Callable[[str], LinearMethod] | None:
        return self.inner.linear_method()
