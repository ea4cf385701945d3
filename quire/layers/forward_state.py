"""What the layers of a forward share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.layers.step_inputs import StepInputs


@dataclass
class ForwardState:
    """What all layers of a step share.

    rotary: cos and sin [tokens, rotary_dim / 2], float32, for each rotary spec of the model. plans: one for each KV
    group. layer_done: if set, called behind each layer; the last one may be left out. first_values: what the first
    layer of an RWKV-7 leaves for the others, [tokens, this rank's values]. slots: of the tokens' low-rank adapters,
    [tokens], int64, -1 for none; None if no token has one.
    """

    inputs: StepInputs
    rotary: list[tuple[Tensor, Tensor]]
    plans: list[Any]
    layer_done: Callable[[], None] | None = None
    first_values: Tensor | None = None
    slots: Tensor | None = None

    def slots_of(self, wanted: Tensor | None) -> Tensor | None:
        """The slots of the tokens whose results are wanted, None for all."""
        return self.slots if self.slots is None else pick(self.slots, wanted)


def pick(x: Tensor, wanted: Tensor | None) -> Tensor:
    """x[wanted], or x itself for None."""
    return x if wanted is None else x.index_select(0, wanted)
