"""The state-space layer of Mamba-1 (arXiv:2312.00752) and Jamba (arXiv:2403.19887)."""

import torch
from torch import Tensor

from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norm import make_norm
from quire.layers.recurrent import Recurrent
from quire.layers.specs import OutputPart
from quire.layers.state_spec import MambaSpec


class Mamba(Recurrent):
    """names: the names of state_in, which projects to x and z; state_x, which projects x to the input of time steps, B
    and C; state_dt, which projects that input to time steps; conv, dt_bias, a_log, skip, state_out; and the norms
    dt_norm, b_norm and c_norm, if the family has them. Each rank has some of the channels, and all ranks together
    compute B and C."""

    def __init__(self, builder: Builder, spec: MambaSpec, names: dict[str, str], place: LayerPlace) -> None:
        super().__init__(builder, spec, names, place, spec.bias)
        self.group, inner, own = builder.tensor_group, spec.num_heads, self.of_heads(1)
        into = [OutputPart(names["state_in"], 2 * inner, *part) for part in (own, self.of_heads(1, inner))]
        self.into = ColumnParallelLinear(builder, spec.hidden_size, into, spec.bias)
        self.convolve(builder, [(f"{names['conv']}.weight", inner, own)], spec.conv_width)
        self.conv_bias = self.vector(builder, [(f"{names['conv']}.bias", inner, own)]) if spec.conv_bias else None
        self.sizes = [spec.rank, spec.key_dim, spec.key_dim]
        self.select = RowParallelLinear(
            builder, names["state_x"], inner, own, sum(self.sizes), is_copy=self.share.is_copy
        )
        roles = zip(("dt_norm", "b_norm", "c_norm"), self.sizes, strict=True)
        self.norms = [make_norm(builder, names.get(role), size, spec.norm) for role, size in roles]
        self.time = ColumnParallelLinear(builder, spec.rank, [OutputPart(names["state_dt"], inner, *own)])
        self.dt_bias, self.skip = (self.vector(builder, [(names[key], inner, own)]) for key in ("dt_bias", "skip"))
        self.rate = self.vector(builder, [(names["a_log"], inner, own)], spec.key_dim)
        builder.when_loaded(self._transpose_rate)

    def _transpose_rate(self) -> None:
        self.rate = self.rate.exp().T.contiguous()

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand."""
        assert self.pages is not None, "bind the cache first"
        kernels = self.kernels
        plan = state.plans[self.place.state_group]
        inputs, z = torch.split(self.into(x, state.slots), [self.values, self.values], 1)
        inputs = kernels.causal_conv(inputs, self.conv, self.conv_bias, self.pages, plan)
        selected = torch.split(self.group.all_reduce(self.select(inputs, state.slots)), self.sizes, 1)
        dt, b, c = (norm(part) for norm, part in zip(self.norms, selected, strict=True))
        steps, _ = kernels.time_steps(self.time(dt, state.slots), self.dt_bias, self.skip, 0.0, float("inf"))
        y = kernels.selective_scan(c, b, inputs, steps, self.rate, self.skip, self.pages, plan)
        y = pick(y, wanted)
        z = pick(z, wanted)
        y = kernels.gated_norm(y, z, None, 0.0, self.values, True, "silu")
        return self.out(y, state.slots_of(wanted))
