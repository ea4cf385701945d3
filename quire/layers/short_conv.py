"""The gated short convolution of LFM2 (arXiv:2511.23404)."""

import torch
from torch import Tensor

from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear
from quire.layers.recurrent import Recurrent
from quire.layers.specs import OutputPart
from quire.layers.state_spec import ShortConvSpec


class ShortConv(Recurrent):
    """out(C * conv(B * x)), without a scan. names: the names of state_in, which projects to B, C and x; conv; and
    state_out. Each rank has some of the channels."""

    def __init__(self, builder: Builder, spec: ShortConvSpec, names: dict[str, str], place: LayerPlace) -> None:
        super().__init__(builder, spec, names, place, spec.bias)
        size = spec.num_heads
        own = self.of_heads(1)
        parts = [self.of_heads(1, start) for start in (0, size, 2 * size)]
        into = [OutputPart(names["state_in"], 3 * size, *part) for part in parts]
        self.into = ColumnParallelLinear(builder, spec.hidden_size, into, spec.bias)
        self.convolve(builder, [(f"{names['conv']}.weight", size, own)], spec.conv_width)
        self.conv_bias = self.vector(builder, [(f"{names['conv']}.bias", size, own)]) if spec.bias else None

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand."""
        assert self.pages is not None, "bind the cache first"
        kernels = self.kernels
        plan = state.plans[self.place.state_group]
        before, after, inputs = torch.split(self.into(x, state.slots), [self.values] * 3, 1)
        inputs = kernels.multiply(inputs, before)
        y = kernels.causal_conv(inputs, self.conv, self.conv_bias, self.pages, plan, silu=False)
        return self.out(kernels.multiply(pick(y, wanted), pick(after, wanted)), state.slots_of(wanted))
