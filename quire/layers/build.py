"""What layers are built with, and how they say which part of which checkpoint tensor each of their parameters is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.ops import Kernels
from quire.parallel.mesh import TensorGroup


@dataclass(frozen=True)
class WeightSlot:
    """A place for a checkpoint tensor: `target` takes source[start:stop] along `dim` (all of it if dim is None).

    shape: what the whole tensor has in the checkpoint.
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0


class Builder:
    """Device, types, kernels and process group for the layers of one model; collects their weight slots."""

    def __init__(self, kernels: Kernels, tensor_group: TensorGroup | None = None) -> None:
        self.kernels = kernels
        self.device = kernels.target.device
        self.dtype = kernels.target.dtype
        self.tensor_group = tensor_group or TensorGroup()
        self.slots: list[WeightSlot] = []
        self.linears: list[Any] = []  # layers with an op `linear` and its `weight`

    def parameter(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def whole(self, name: str, *shape: int) -> Tensor:
        """A parameter that every rank keeps whole, such as a norm's weight."""
        target = self.parameter(*shape)
        self.slots.append(WeightSlot(name, target, shape))
        return target

    def part(self, name: str, target: Tensor, shape: tuple[int, ...], dim: int, start: int, stop: int) -> None:
        """Note that `target` is rows (dim 0) or columns (dim 1) [start, stop) of the tensor called `name`."""
        self.slots.append(WeightSlot(name, target, shape, dim, start, stop))

    def finish(self) -> None:
        """Call when the weights are loaded: packs those of linear layers, one by one, and lets go of the originals."""
        self.slots.clear()
        for layer in self.linears:
            if hasattr(layer.linear, "pack"):
                layer.weight = layer.linear.pack(layer.weight)
        self.linears.clear()
