"""The layer of RWKV-7 (arXiv:2503.14456), whose state is changed by a generalized delta rule."""

from collections.abc import Callable
from math import exp

import torch
from torch import Tensor

from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear, ReplicatedLinear
from quire.layers.recurrent import Recurrent, by_head
from quire.layers.specs import OutputPart
from quire.layers.state_spec import RwkvSpec

_EPS = 1e-24  # keeps a removal key of zeros at zero instead of NaN


class NarrowProduct:
    """A product of two narrow matrices, of which each rank computes some outputs. inner: between both."""

    def __init__(
        self, builder: Builder, name: str, rank: int, outputs: tuple[int, int, int], bias: bool,
        inner: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:  # fmt: skip
        self.inner, hidden = inner, outputs[0]
        self.down = ReplicatedLinear(builder, f"{name}.0", hidden, rank)
        self.up = ColumnParallelLinear(builder, rank, [OutputPart(f"{name}.2", *outputs)], bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, this rank's outputs]"""
        return self.up(self.inner(self.down(x)))


class Rwkv(Recurrent):
    """names: of mix_r, mix_w, mix_k, mix_v, mix_a and mix_g: how much of the token before is in the inputs of
    receptance, decay, key, value, rate and gate. Of mlp_mix, the same of the MLP. Of state_r, state_k and state_v, and
    of low_w, low_v, low_a and low_g, which are NarrowProduct. Of removal_scale and rate_scale, by which a key becomes
    the one that is removed and the one that is added. Of bonus, gate_norm and state_out."""

    def __init__(self, builder: Builder, spec: RwkvSpec, names: dict[str, str], place: LayerPlace) -> None:
        super().__init__(builder, spec, names, place)
        self.eps, hidden, own = spec.norm.eps, spec.hidden_size, self.of_heads(spec.key_dim)
        self.mix = self.vector(builder, [(names[f"mix_{key}"], 1, (0, 1)) for key in "rwkvag"], hidden)[:, None]
        self.mlp_mix = builder.whole(names["mlp_mix"], hidden, dtype=torch.float32)
        self.project = {
            key: ColumnParallelLinear(builder, hidden, [OutputPart(names[f"state_{key}"], hidden, *own)])
            for key in "rkv"
        }

        def low(key: str, rank: int, *inner: Callable[[Tensor], Tensor]) -> NarrowProduct:
            return NarrowProduct(builder, names[f"low_{key}"], rank, (hidden, *own), key != "g", *inner)

        self.decay = low("w", spec.decay_rank, self._tanh)
        self.rate = low("a", spec.rate_rank)
        self.gate = low("g", spec.gate_rank, self._sigmoid)
        self.first_part = low("v", spec.value_rank) if spec.value_rank else None
        norm = names["gate_norm"]
        self.removal_scale, self.rate_scale, self.norm_weight, self.norm_bias = (
            self.vector(builder, [(name, hidden, own)])
            for name in (names["removal_scale"], names["rate_scale"], f"{norm}.weight", f"{norm}.bias")
        )
        self.bonus = self.vector(builder, [(names["bonus"], spec.num_heads, self.of_heads(1))], spec.key_dim)
        # The convolution of width 2, without an activation, that returns the token before.
        self.before = torch.tensor([[1.0], [0.0]], device=builder.device).repeat(1, hidden)
        self.unit = torch.full((spec.key_dim,), spec.key_dim**-0.5, device=builder.device)

    # The kernels' results do not depend on an element's place, and those of torch's exp and tanh do.
    def _sigmoid(self, x: Tensor) -> Tensor:
        out: Tensor = self.kernels.activate(x, "sigmoid")
        return out

    def _tanh(self, x: Tensor) -> Tensor:
        return (2 * self._sigmoid(2 * x.float()) - 1).to(x.dtype)

    def _exp(self, x: Tensor) -> Tensor:
        """exp(x) = s / (1 - s) with s = sigmoid(x), precise for x near 0."""
        part = self._sigmoid(x)
        return part / (1 - part)

    def _shift(self, x: Tensor, inputs: Tensor, mix: Tensor, state: ForwardState) -> Tensor:
        """Mixes of each token and the one before. inputs: of the pages. mix: [..., hidden] -> [..., tokens, hidden]"""
        assert self.pages is not None, "bind the cache first"
        pages, plan = self.pages._replace(inputs=inputs), state.plans[self.place.state_group]
        before = self.kernels.causal_conv(x, self.before, None, pages, plan, False)
        mixed: Tensor = x + (before - x) * mix
        return mixed.to(x.dtype)

    def mlp_input(self, x: Tensor, state: ForwardState, wanted: Tensor | None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden]"""
        assert self.pages is not None, "bind the cache first"
        return pick(self._shift(x, self.pages.mlp_inputs, self.mlp_mix, state), wanted)

    def __call__(self, x: Tensor, state: ForwardState) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden], this rank's summand. The first layer leaves its values in `state`,
        and each other layer adds a part of them to its own."""
        assert self.pages is not None, "bind the cache first"
        kernels, plan, heads, dim = self.kernels, state.plans[self.place.state_group], self.num_heads, self.key_dim
        given = dict(zip("rwkvag", self._shift(x, self.pages.inputs, self.mix, state), strict=True))
        r, k, v = (self.project[key](given[key]) for key in "rkv")
        if self.first_part is None:
            state.first_values = v
        else:
            v = v + (state.first_values - v) * self._sigmoid(self.first_part(given["v"]))  # type: ignore[operator]
        decay = self._exp(-exp(-0.5) * self._sigmoid(self.decay(given["w"]).float()))
        rate = self._sigmoid(self.rate(given["a"]).float())
        read = kernels.rms_norm(by_head((k * self.removal_scale).to(x.dtype), heads, dim), self.unit, _EPS).float()
        removal = torch.stack([read, read * rate.view(read.shape)], 2).flatten(1)
        k = (k * (1 + (rate - 1) * self.rate_scale)).to(x.dtype)
        r, k, values = (by_head(part, heads, dim) for part in (r, k, v))
        y = kernels.scan(r, k, values, decay, removal, None, self.pages, plan, "removal")
        y = kernels.layer_norm(y.flatten(0, 1), None, None, self.eps).view(len(x), -1)
        bonus = kernels.row_sums((r * k * self.bonus).flatten(0, 1)).view(len(x), heads, 1) * values
        y = y * self.norm_weight + self.norm_bias + bonus.flatten(1)
        return self.out((y * self.gate(given["g"])).to(x.dtype))
