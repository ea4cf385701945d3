"""What layers are built with, and how they say which part of which checkpoint tensor each of their parameters is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.ops import Kernels
from quire.parallel.mesh import TensorGroup

if TYPE_CHECKING:
    from quire.layers.linear import LinearMethod


@dataclass(frozen=True)
class WeightSlot:
    """A place for a checkpoint tensor: `target` takes source[pick], its last two dimensions exchanged if `transposed`.

    shape: what the whole tensor has in the checkpoint. pick: one slice a leading dimension; () is all of it.
    A shape () fits any tensor of one number.
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    pick: tuple[slice, ...] = ()
    transposed: bool = False


class Builder:
    """Device, types, kernels and process group for the layers of one model; collects their weight slots.

    method_of: the format in which the checkpoint keeps the linear layer of a given name.
    """

    def __init__(self, kernels: Kernels, tensor_group: TensorGroup, method_of: "Callable[[str], LinearMethod]") -> None:
        self.kernels = kernels
        self.device = kernels.target.device
        self.dtype = kernels.target.dtype
        self.tensor_group = tensor_group
        self.method_of = method_of
        self.slots: list[WeightSlot] = []
        self.when_loaded: list[Callable[[], None]] = []

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def whole(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter that every rank keeps whole, such as a norm's weight."""
        target = self.parameter(*shape, dtype=dtype)
        self.slots.append(WeightSlot(name, target, shape))
        return target

    def part(self, name: str, target: Tensor, shape: tuple[int, ...], *pick: slice, transposed: bool = False) -> None:
        """Note that `target` is the part [pick] of the tensor called `name`."""
        self.slots.append(WeightSlot(name, target, shape, pick, transposed))

    def finish(self) -> None:
        """Call when the weights are loaded: layers bring theirs, one by one, into the form they compute from."""
        self.slots.clear()
        for action in self.when_loaded:
            action()
        self.when_loaded.clear()
