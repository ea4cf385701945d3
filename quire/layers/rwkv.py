"""The layer of RWKV-7 (arXiv:2503.14456), which updates its state by a generalized delta rule."""

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
    """A product of two narrow matrices; each rank computes some of its outputs. inner: the activation between the
    matrices."""

    def __init__(
        self, builder: Builder, name: str, rank: int, outputs: tuple[int, int, int], bias: bool, inner: str | None
    ) -> None:
        self.kernels = builder.kernels
        self.inner = inner
        hidden = outputs[0]
        self.down = ReplicatedLinear(builder, f"{name}.0", hidden, rank)
        self.up = ColumnParallelLinear(builder, rank, [OutputPart(f"{name}.2", *outputs)], bias)

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """x: [tokens, hidden] -> [tokens, this rank's outputs]. slots: the slots of the tokens' adapters."""
        x = self.down(x, slots)
        return self.up(x if self.inner is None else self.kernels.activate(x, self.inner), slots)


class Rwkv(Recurrent):
    """names: the names of mix_r, mix_w, mix_k, mix_v, mix_a and mix_g, the share of the previous token in the inputs of
    receptance, decay, key, value, rate and gate; of mlp_mix, the same for the MLP; of state_r, state_k and state_v; of
    low_w, low_v, low_a and low_g, which are NarrowProduct; of removal_scale and rate_scale, the factors that turn a key
    into the removed key and the added key; of bonus, gate_norm and state_out."""

    def __init__(self, builder: Builder, spec: RwkvSpec, names: dict[str, str], place: LayerPlace) -> None:
        super().__init__(builder, spec, names, place)
        self.eps, hidden, own = spec.norm.eps, spec.hidden_size, self.of_heads(spec.key_dim)
        self.mix = self.vector(builder, [(names[f"mix_{key}"], 1, (0, 1)) for key in "rwkvag"], hidden)[:, None]
        self.mlp_mix = builder.whole(names["mlp_mix"], hidden, dtype=torch.float32)[None, None]
        self.project = {
            key: ColumnParallelLinear(builder, hidden, [OutputPart(names[f"state_{key}"], hidden, *own)])
            for key in "rkv"
        }

        def low(key: str, rank: int, inner: str | None = None) -> NarrowProduct:
            return NarrowProduct(builder, names[f"low_{key}"], rank, (hidden, *own), key != "g", inner)

        self.decay = low("w", spec.decay_rank, "tanh")
        self.rate = low("a", spec.rate_rank)
        self.gate = low("g", spec.gate_rank, "sigmoid")
        self.first_part = low("v", spec.value_rank) if spec.value_rank else None
        norm = names["gate_norm"]
        self.removal_scale, self.rate_scale, self.norm_weight, self.norm_bias = (
            self.vector(builder, [(name, hidden, own)])
            for name in (names["removal_scale"], names["rate_scale"], f"{norm}.weight", f"{norm}.bias")
        )
        bonus = [(names["bonus"], spec.num_heads, self.of_heads(1))]
        self.bonus = self.vector(builder, bonus, spec.key_dim).view(-1)
        # A convolution of width 2, without an activation, that returns the previous token.
        self.before = torch.tensor([[1.0], [0.0]], device=builder.device).repeat(1, hidden)
        self.unit = torch.full((spec.key_dim,), spec.key_dim**-0.5, device=builder.device)

    def _shift(self, x: Tensor, inputs: Tensor, mixes: Tensor, state: ForwardState) -> Tensor:
        """Return mixes of each token and the previous one. inputs: the pages' inputs; mixes: [n, 1, hidden] -> [n,
        tokens, hidden]"""
        assert self.pages is not None, "bind the cache first"
        pages = self.pages._replace(inputs=inputs)
        plan = state.plans[self.place.state_group]
        before = self.kernels.causal_conv(x, self.before, None, pages, plan, False)
        mixed: Tensor = self.kernels.lerp(x, before, mixes)
        return mixed

    def mlp_input(self, x: Tensor, state: ForwardState, wanted: Tensor | None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden]"""
        assert self.pages is not None, "bind the cache first"
        return pick(self._shift(x, self.pages.mlp_inputs, self.mlp_mix, state)[0], wanted)

    def __call__(self, x: Tensor, state: ForwardState) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden], this rank's summand. The first layer stores its values in `state`,
        and every later layer adds a part of them to its own values."""
        assert self.pages is not None, "bind the cache first"
        kernels = self.kernels
        plan = state.plans[self.place.state_group]
        heads = self.num_heads
        dim = self.key_dim
        slots = state.slots
        given = dict(zip("rwkvag", self._shift(x, self.pages.inputs, self.mix, state), strict=True))
        r, k, v = (self.project[key](given[key], slots) for key in "rkv")
        if self.first_part is None:
            state.first_values = v
        else:
            parts = kernels.activate(self.first_part(given["v"], slots), "sigmoid")
            v = kernels.lerp(v, state.first_values, parts[None])[0]
        read = kernels.rms_norm(by_head(kernels.multiply(k, self.removal_scale), heads, dim), self.unit, _EPS)
        k, decay, removal, products = kernels.removal_keys(
            r, k, read, self.decay(given["w"], slots), self.rate(given["a"], slots), self.rate_scale, self.bonus
        )
        q, keys, values = (by_head(part, heads, dim) for part in (r, k, v))
        y = kernels.scan(q, keys, values, decay, removal, None, self.pages, plan, "removal")
        y = kernels.layer_norm(y.flatten(0, 1), None, None, self.eps)
        bonus = kernels.row_sums(products.view(len(y), dim))
        y = kernels.add_bonus(y, self.norm_weight, self.norm_bias, bonus, v, self.gate(given["g"], slots))
        return self.out(y, slots)
