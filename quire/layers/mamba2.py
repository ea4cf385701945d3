"""The state-space layer of Mamba-2 (arXiv:2405.21060)."""

import torch
from torch import Tensor

from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear
from quire.layers.qk_norm import RMSNormOfAllHeads
from quire.layers.recurrent import Recurrent, by_head
from quire.layers.specs import OutputPart
from quire.layers.state_spec import Mamba2Spec


class Mamba2(Recurrent):
    """names: the names of state_in (projects to z, x, B, C and dt), conv, dt_bias, a_log, skip, gate_norm,
    state_out."""

    def __init__(self, builder: Builder, spec: Mamba2Spec, names: dict[str, str], place: LayerPlace) -> None:
        super().__init__(builder, spec, names, place, spec.bias)
        self.spec = spec
        hidden = spec.hidden_size
        heads = spec.num_heads
        groups = spec.num_kv_heads
        inner = heads * spec.value_dim
        states = groups * spec.key_dim
        z = self.of_heads(spec.value_dim)
        x = self.of_heads(spec.value_dim, inner)
        b, c = (self.of_key_heads(spec.key_dim, start) for start in (2 * inner, 2 * inner + states))
        dt = self.of_heads(1, 2 * (inner + states))
        rows = 2 * (inner + states) + heads
        self.into = ColumnParallelLinear(
            builder, hidden, [OutputPart(names["state_in"], rows, *part) for part in (z, x, b, c, dt)], spec.bias
        )
        channels = inner + 2 * states
        parts = [(start - inner, stop - inner) for start, stop in (x, b, c)]
        weights, biases = (
            [(f"{names['conv']}.{kind}", channels, part) for part in parts] for kind in ("weight", "bias")
        )
        self.convolve(builder, weights, spec.conv_width)
        self.conv_bias = self.vector(builder, biases) if spec.conv_bias else None
        self.dt_bias, self.rate, self.skip = (
            self.vector(builder, [(names[key], heads, self.of_heads(1))]) for key in ("dt_bias", "a_log", "skip")
        )
        self.norm_weight: Tensor | None = None
        self.norm_of_ranks: RMSNormOfAllHeads | None = None
        if spec.has_norm and self.share.holders > 1:  # several ranks share a group, so they norm it together
            if groups > 1:
                raise ValueError(
                    f"tensor_parallel_size={builder.tensor_group.size} must divide the {groups} groups of "
                    "Mamba-2's norm; lower it"
                )
            self.norm_of_ranks = RMSNormOfAllHeads(
                builder,
                names["gate_norm"],
                spec.norm,
                spec.value_dim,
                heads,
                self.share.heads,
                0.0 if self.share.is_copy else 1.0,
            )
        elif spec.has_norm:
            self.norm_weight = builder.parameter(self.values)
            builder.part(f"{names['gate_norm']}.weight", self.norm_weight, (inner,), slice(*z))
        self.factors: Tensor | None = None
        if spec.multipliers is not None:
            sizes = [stop - start for start, stop in (z, x, b, c, dt)]
            factors = [m for m, n in zip(spec.multipliers, sizes, strict=True) for _ in range(n)]
            self.factors = self.conv.new_tensor(factors).to(builder.dtype)

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand."""
        assert self.pages is not None, "bind the cache first"
        spec = self.spec
        kernels = self.kernels
        plan = state.plans[self.place.state_group]
        projected = self.into(x, state.slots)
        if self.factors is not None:
            projected = kernels.multiply(projected, self.factors)
        channels = self.values + 2 * self.keys
        z, inputs, dt = torch.split(projected, [self.values, channels, self.num_heads], 1)
        inputs = kernels.causal_conv(inputs, self.conv, self.conv_bias, self.pages, plan)
        steps, decay = kernels.time_steps(dt, self.dt_bias, self.rate, *spec.time_step)
        v, k, q = torch.split(inputs, [self.values, self.keys, self.keys], 1)
        heads = (self.num_heads, self.value_dim)
        key_heads = (self.num_kv_heads, self.key_dim)
        y = kernels.scan(
            by_head(q, *key_heads),
            by_head(k, *key_heads),
            by_head(v, *heads),
            decay,
            steps,
            self.skip,
            self.pages,
            plan,
            "plain",
        )
        y = pick(y.flatten(1), wanted)
        z = pick(z, wanted)
        size = self.values // self.num_kv_heads
        if self.norm_of_ranks is not None and not spec.gate_first:
            y = self.norm_of_ranks(by_head(y, *heads)).flatten(1)
        y = kernels.gated_norm(y, z, self.norm_weight, spec.norm.eps, size, spec.gate_first, "silu")
        if self.norm_of_ranks is not None and spec.gate_first:
            y = self.norm_of_ranks(by_head(y, *heads)).flatten(1)
        return self.out(y, state.slots_of(wanted))
