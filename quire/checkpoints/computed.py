"""Checkpoints whose tensors are computed from those in the files when they are read."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from quire.checkpoints.weights import Checkpoint, check_shape
from quire.layers.build import WeightSlot


class Read(Protocol):
    def __call__(self, name: str, *pick: slice) -> Tensor:
        """Return a part of a tensor, or without `pick`, the whole."""


def reader(checkpoint: Checkpoint) -> Read:
    def read(name: str, *pick: slice) -> Tensor:
        return checkpoint.read(WeightSlot(name, torch.empty(0), checkpoint.shape(name), pick))

    return read


class ComputedCheckpoint(Checkpoint):
    """Presents the tensors of `inner` and further ones. computed: the function that makes a tensor, by its name.
    hidden: tensors of `inner` that are not presented."""

    def __init__(
        self, inner: Checkpoint, computed: Mapping[str, Callable[[Read], Tensor]], hidden: frozenset[str] = frozenset()
    ) -> None:
        self.inner = inner
        self.computed = computed
        self.names = dict.fromkeys([*(name for name in inner.names if name not in hidden), *computed])

    def read(self, slot: WeightSlot) -> Tensor:
        if slot.name not in self.computed:
            return self.inner.read(slot)
        whole = self.computed[slot.name](reader(self.inner))
        check_shape(slot, whole.shape)
        return whole[slot.pick]

    def copy_into(self, slot: WeightSlot) -> None:
        name = self.alias(slot.name)
        if name in self.computed:
            super().copy_into(slot)
        else:
            self.inner.copy_into(replace(slot, name=name))
