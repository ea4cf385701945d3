"""The builder of layers. It also records which part of a checkpoint tensor fills each parameter."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quire.ops import Kernels
from quire.ops.memory import empty
from quire.parallel.mesh import Communicator
from quire.parallel.residual_stream import ResidualStream

if TYPE_CHECKING:
    from quire.layers.linear import LinearMethod, Quantizer
    from quire.layers.lora import AdapterSlots
    from quire.parallel.experts import ExpertRanks


@dataclass(frozen=True)
class WeightSlot:
    """`target` is filled with source[pick] of a checkpoint tensor, with its last two dimensions swapped if
    `transposed`.

    shape: the shape of the whole tensor in the checkpoint; () fits any tensor with one element. pick: a slice for each
    leading dimension; () picks the whole tensor. is_raw: whether a single weight of the builder reads the target, to
    make its final form.
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    pick: tuple[slice, ...] = ()
    transposed: bool = False
    is_raw: bool = False


class Weight(Protocol):
    """A weight that is converted to its final form, packed or quantized, when its slots are filled."""

    lasting: str  # the name of the attribute with the final form


class Builder:
    """Provides device, types, kernels and process group to the layers of one model, and collects their weight slots.

    method_of: the linear method for the checkpoint's format of the layer with the given name. quantizer_of: the
    quantizer for a layer that is dense in the checkpoint, applied at load; None to leave it dense. adapters: the slots
    of low-rank adapters for the model's linear layers, None without adapters. experts: the ranks across which experts
    are distributed, None if the ranks of the tensor group divide each expert. residual_stream: None if every rank has
    the whole stream. shape_of: the shape of a tensor in the checkpoint; None if there is no tensor of that name, () if
    the checkpoint is unknown.
    """

    def __init__(
        self,
        kernels: Kernels,
        tensor_group: Communicator,
        method_of: "Callable[[str], LinearMethod]",
        quantizer_of: "Callable[[str], Quantizer | None]" = lambda name: None,
        adapters: "AdapterSlots | None" = None,
        experts: "ExpertRanks | None" = None,
        residual_stream: ResidualStream | None = None,
        shape_of: Callable[[str], tuple[int, ...] | None] = lambda name: (),
    ) -> None:
        self.kernels = kernels
        self.experts = experts
        self.device = kernels.target.device
        self.dtype = kernels.target.dtype
        self.tensor_group = tensor_group
        self.residual_stream = residual_stream or ResidualStream(tensor_group)
        self.method_of = method_of
        self.quantizer_of = quantizer_of
        self.adapters = adapters
        self.shape_of = shape_of
        self.shared: dict[str, Any] = {}  # tables by name, which layers, or an encoder and a decoder, may share
        self.slots: list[WeightSlot] = []
        self.weights: list[Weight] = []
        self._sizes: dict[str, int] = {}  # parameters by the name of a checkpoint tensor
        # With the number of slots that must be filled first, and whether it makes the final form of a weight
        self._actions: list[tuple[int, Callable[[], None], bool]] = []

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def whole(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a parameter that every rank holds whole, such as a norm's weight."""
        target = self.parameter(*shape, dtype=dtype)
        self.part(name, target, shape)
        return target

    def part(
        self,
        name: str,
        target: Tensor,
        shape: tuple[int, ...],
        *pick: slice,
        transposed: bool = False,
        is_raw: bool = False,
    ) -> None:
        """Record that `target` is filled with the part [pick] of the checkpoint tensor called `name`."""
        self.count(name, math.prod(shape))
        self.slots.append(WeightSlot(name, target, shape, pick, transposed, is_raw))

    def quantized_part(self, name: str, target: Tensor, shape: tuple[int, ...], *pick: slice) -> None:
        """Like `part`, for a tensor of codes or scales. Its parameters are counted with a separate call of `count`."""
        self.slots.append(WeightSlot(name, target, shape, pick, is_raw=True))

    def count(self, name: str, num_parameters: int) -> None:
        """Count the parameters of the weight `name` on all ranks together. Repeated calls count once."""
        self._sizes.setdefault(name, num_parameters)

    @cached_property
    def elsewhere(self) -> "Outline":
        """A builder for layers that only other ranks have, so that their parameters are counted and their tensors are
        known."""
        return Outline(self, self._sizes)

    @property
    def tensors_elsewhere(self) -> set[str]:
        """The names of the tensors that only other ranks have."""
        outline = self.__dict__.get("elsewhere")  # without creating one
        return set() if outline is None else {slot.name for slot in outline.slots}

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the whole model, on all ranks."""
        return sum(self._sizes.values())

    def when_loaded(self, action: Callable[[], None], makes_lasting: bool = False) -> None:
        """Call `action` as soon as the slots noted so far are filled.

        makes_lasting: whether it makes the final form of a weight; it is not called if the weights were restored.
        """
        self._actions.append((len(self.slots), action, makes_lasting))

    def fill(self, fill: Callable[[WeightSlot], None], is_restored: bool = False) -> None:
        """Fill the slots in order. Each layer's actions (packing, quantizing) run as soon as its slots are filled, so
        memory never holds the whole model in two forms.

        is_restored: whether weights are already in their final forms, so that raw slots are not filled.
        """
        slots = self.slots
        actions = [*self._actions, (len(self.slots), lambda: None, False)]
        self.slots = []
        self._actions = []
        slots.reverse()
        actions.reverse()
        filled = 0
        while actions:
            needed, action, makes_lasting = actions.pop()
            for _ in range(needed - filled):
                slot = slots.pop()
                if not (slot.is_raw and is_restored):
                    fill(slot)
            filled = needed
            if not (makes_lasting and is_restored):
                action()


class Outline(Builder):
    """A builder whose parameters have shapes, but no memory."""

    def __init__(self, builder: Builder, sizes: dict[str, int] | None = None) -> None:
        """sizes: where to count parameters, by the name of a checkpoint tensor; None to count them here only."""
        super().__init__(
            builder.kernels,
            builder.tensor_group,
            builder.method_of,
            builder.quantizer_of,
            None,
            builder.experts,
            shape_of=builder.shape_of,
        )
        self.device = torch.device("meta")
        if sizes is not None:
            self._sizes = sizes

    @property
    def num_bytes(self) -> int:
        return sum(slot.target.nbytes for slot in self.slots)
