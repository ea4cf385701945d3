"""What layers are built with, and how they say which part of which checkpoint tensor each of their parameters is."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.ops import Kernels
from quire.ops.memory import empty
from quire.parallel.mesh import Communicator

if TYPE_CHECKING:
    from quire.layers.linear import LinearMethod, Quantizer


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

    method_of: the format in which the checkpoint keeps the linear layer of a given name. quantizer_of: what brings a
    layer that it keeps dense into another form when it is loaded, if anything.
    """

    def __init__(
        self, kernels: Kernels, tensor_group: Communicator, method_of: "Callable[[str], LinearMethod]",
        quantizer_of: "Callable[[str], Quantizer | None]" = lambda name: None,
    ) -> None:  # fmt: skip
        self.kernels = kernels
        self.device = kernels.target.device
        self.dtype = kernels.target.dtype
        self.tensor_group = tensor_group
        self.method_of, self.quantizer_of = method_of, quantizer_of
        self.slots: list[WeightSlot] = []
        self._sizes: dict[str, int] = {}  # parameters in each of the checkpoint's tensors, or in what one stands for
        self._actions: list[tuple[int, Callable[[], None]]] = []  # and how many slots must be filled before

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def whole(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter that every rank keeps whole, such as a norm's weight."""
        target = self.parameter(*shape, dtype=dtype)
        self.part(name, target, shape)
        return target

    def part(self, name: str, target: Tensor, shape: tuple[int, ...], *pick: slice, transposed: bool = False) -> None:
        """Note that `target` is the part [pick] of the tensor called `name`."""
        self.count(name, math.prod(shape))
        self.slots.append(WeightSlot(name, target, shape, pick, transposed))

    def quantized_part(self, name: str, target: Tensor, shape: tuple[int, ...], *pick: slice) -> None:
        """The same of a tensor that holds codes or scales: `count` says how many parameters they stand for."""
        self.slots.append(WeightSlot(name, target, shape, pick))

    def count(self, name: str, num_parameters: int) -> None:
        """Count the parameters of the weight `name`, of all ranks together; once, however often it is named."""
        self._sizes.setdefault(name, num_parameters)

    @property
    def num_parameters(self) -> int:
        """Of the whole model, on all ranks."""
        return sum(self._sizes.values())

    def when_loaded(self, action: Callable[[], None]) -> None:
        """Have `action` called as soon as the slots noted so far are filled."""
        self._actions.append((len(self.slots), action))

    def fill(self, fill: Callable[[WeightSlot], None]) -> None:
        """Fill the slots in order. Layers bring their weights into the form they compute from one by one on the way, so
        that there are never two forms of the whole model."""
        slots, actions = self.slots, self._actions
        self.slots, self._actions = [], []
        slots.reverse()
        filled = 0
        for needed, action in actions:
            for _ in range(needed - filled):
                fill(slots.pop())
            filled = needed
            action()
        while slots:
            fill(slots.pop())
