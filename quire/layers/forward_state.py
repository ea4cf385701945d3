"""The state that the layers of a forward pass share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire.layers.step_inputs import StepInputs


@dataclass
class ForwardState:
    """The state that all layers share in a step.

    rotary: cos and sin [tokens, rotary_dim / 2], float32, for each rotary spec of the model. plans: one for each KV
    group. layer_done: if set, called after each layer, except perhaps the last one. first_values: in an RWKV-7, the
    values of the first layer, which the others read, [tokens, this rank's values]. slots: the slots of the tokens'
    low-rank adapters, [tokens], int64, -1 for none; None if no token has one. per_layer: see PerLayerEmbedding, of this
    rank's own tokens. streams: the residual stream before layers from which connections skip others, by layer.
    """

    inputs: StepInputs
    rotary: list[tuple[Tensor, Tensor]]
    plans: list[Any]
    layer_done: Callable[[], None] | None = None
    first_values: Tensor | None = None
    slots: Tensor | None = None
    per_layer: Tensor | None = None
    streams: dict[int, Tensor] = field(default_factory=dict)

    def slots_of(self, wanted: Tensor | None) -> Tensor | None:
        """Return the slots of the tokens whose results are wanted; wanted: None for all."""
        return self.slots if self.slots is None else pick(self.slots, wanted)


def pick(x: Tensor, wanted: Tensor | None) -> Tensor:
    """Return x[wanted], or x itself if `wanted` is None."""
    return x if wanted is None else x.index_select(0, wanted)
