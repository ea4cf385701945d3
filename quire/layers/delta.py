"""Layers with the gated delta rule: Gated DeltaNet (arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692)."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear, ReplicatedLinear
from quire.layers.recurrent import Part, Recurrent, by_head
from quire.layers.specs import OutputPart
from quire.layers.state_spec import DeltaSpec

_EPS = 1e-6  # for the norms of queries and keys


class DeltaNet(Recurrent):
    """names: the names of dt_bias, a_log, gate_norm and state_out; of conv, or of conv_q, conv_k and conv_v; and of the
    projections: state_in (q, k, v, z) and state_ba, or state_qkv (or state_q, state_k and state_v), state_z, state_b
    and state_a (also those of Ling 3), or state_q, state_k, state_v, state_b, decay_a, decay_b, gate_a and gate_b."""

    def __init__(self, builder: Builder, spec: DeltaSpec, names: dict[str, str], place: LayerPlace) -> None:
        super().__init__(builder, spec, names, place)
        self.spec = spec
        heads = spec.num_heads
        key_heads = spec.num_kv_heads
        keys = key_heads * spec.key_dim
        values = heads * spec.value_dim
        qkv = [
            *(self.of_key_heads(spec.key_dim, start) for start in (0, keys)),
            self.of_heads(spec.value_dim, 2 * keys),
        ]
        total = 2 * keys + values
        one = self.of_heads(1)
        self.is_kimi = spec.projections == "kimi"
        self.activation = "sigmoid" if spec.projections.startswith("kimi") else "silu"
        self.into = ColumnParallelLinear(builder, spec.hidden_size, self._outputs(names, qkv))
        conv = (
            [(f"{names['conv']}.weight", total, part) for part in qkv]
            if "conv" in names
            else [(f"{names[f'conv_{key}']}.weight", rows, part) for key, rows, part in self._separate(qkv)]
        )
        self.convolve(builder, conv, spec.conv_width)
        steps = [(names["dt_bias"], heads * spec.decays, self.of_heads(spec.decays))]
        self.dt_bias = self.vector(builder, steps)
        if self.is_kimi:
            self.rate = builder.parameter(self.num_heads, dtype=torch.float32)
            if builder.shape_of(names["a_log"]) == (heads,):  # GLM-5-Next
                builder.part(names["a_log"], self.rate, (heads,), slice(*one))
            else:
                rates = self.rate.view(1, 1, -1, 1)
                builder.part(names["a_log"], rates, (1, 1, heads, 1), slice(1), slice(1), slice(*one))
            builder.when_loaded(self._repeat_rates)
            rank = spec.value_dim
            outputs = self.of_heads(spec.value_dim)
            self.decay_in = ReplicatedLinear(builder, names["decay_a"], spec.hidden_size, rank)
            self.gate_in = ReplicatedLinear(builder, names["gate_a"], spec.hidden_size, rank)
            self.decay_out, self.gate_out = (
                ColumnParallelLinear(builder, rank, [OutputPart(names[key], values, *outputs)])
                for key in ("decay_b", "gate_b")
            )
        else:
            self.rate = self.vector(builder, [(names["a_log"], heads, one)])
            if spec.decays > 1:
                builder.when_loaded(self._repeat_rates)
        self.gate_weight = builder.whole(f"{names['gate_norm']}.weight", spec.value_dim)
        builder.when_loaded(self._repeat_gate_weight)
        # An L2 norm is an RMS norm divided by the root of the vector's size. Queries are divided by this root again.
        scale = torch.tensor([spec.key_dim**-1.0, spec.key_dim**-0.5], dtype=torch.float32, device=builder.device)
        self.q_scale, self.k_scale = scale[:, None].repeat(1, spec.key_dim)

    def _repeat_rates(self) -> None:
        self.rate = self.rate.repeat_interleave(self.spec.decays)

    def _repeat_gate_weight(self) -> None:
        self.gate_weight = self.gate_weight.repeat(self.num_heads)

    def _separate(self, qkv: list[Part]) -> list[tuple[str, int, Part]]:
        """Return q, k and v as separate tensors: name, number of rows, and this rank's rows."""
        keys = self.spec.num_kv_heads * self.spec.key_dim
        values = self.spec.num_heads * self.spec.value_dim
        sizes = (keys, keys, values)
        starts = (0, keys, 2 * keys)
        return [
            (key, rows, (part[0] - start, part[1] - start))
            for key, rows, part, start in zip("qkv", sizes, qkv, starts, strict=True)
        ]

    def _outputs(self, names: dict[str, str], qkv: list[Part]) -> list[OutputPart]:
        """Return the projections to q, k, v of all heads, then to z, b and a, if these are products of the input."""
        spec = self.spec
        heads = self.spec.num_heads
        ratio = self.spec.num_heads // self.spec.num_kv_heads
        keys = spec.num_kv_heads * spec.key_dim
        values = heads * spec.value_dim
        one = self.of_heads(1)
        parts = [OutputPart(names["state_qkv"], 2 * keys + values, *part) for part in qkv if "state_qkv" in names]
        if "state_q" in names:
            parts = [OutputPart(names[f"state_{key}"], rows, *part) for key, rows, part in self._separate(qkv)]
        if spec.projections == "kimi":
            return [*parts, OutputPart(names["state_b"], heads, *one)]
        if spec.projections != "by_key_head":
            z = OutputPart(names["state_z"], values, *self.of_heads(spec.value_dim))
            decay = OutputPart(names["state_a"], heads * spec.decays, *self.of_heads(spec.decays))
            return [*parts, z, OutputPart(names["state_b"], heads, *one), decay]
        group = 2 * (spec.key_dim + ratio * spec.value_dim)
        rows = 2 * (keys + values)
        size = spec.value_dim

        def of_each(name: str, total: int, starts: Iterable[int], size: int) -> list[OutputPart]:
            return [OutputPart(names[name], total, start, start + size) for start in starts]

        def of_heads(group: int, first: int, size: int) -> Iterator[int]:
            return (h // ratio * group + first + h % ratio * size for h in self.share.heads)

        q, k = ([g * group + first for g in self.share.kv_heads] for first in (0, spec.key_dim))
        v, z_of = (of_heads(group, 2 * spec.key_dim + first, size) for first in (0, ratio * size))
        b, a = (of_heads(2 * ratio, first, 1) for first in (0, ratio))
        return [
            *of_each("state_in", rows, [*q, *k], spec.key_dim),
            *of_each("state_in", rows, [*v, *z_of], size),
            *of_each("state_ba", 2 * heads, [*b, *a], 1),
        ]

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand."""
        assert self.pages is not None, "bind the cache first"
        kernels = self.kernels
        plan = state.plans[self.place.state_group]
        channels = 2 * self.keys + self.values
        heads = self.num_heads
        slots = state.slots
        wanted_slots = state.slots_of(wanted)
        if self.is_kimi:
            inputs, b = torch.split(self.into(x, slots), [channels, heads], 1)
            a = self.decay_out(self.decay_in(x, slots), slots)
            z = self.gate_out(self.gate_in(pick(x, wanted), wanted_slots), wanted_slots)
        else:
            sizes = [channels, self.values, heads, heads * self.spec.decays]
            inputs, z, b, a = torch.split(self.into(x, slots), sizes, 1)
            z = pick(z, wanted)
        inputs = kernels.causal_conv(inputs, self.conv, None, self.pages, plan)
        q, k, v = torch.split(inputs, [self.keys, self.keys, self.values], 1)
        q, k = (by_head(part, self.num_kv_heads, self.key_dim) for part in (q, k))
        eps = _EPS / self.key_dim
        q = kernels.rms_norm(q, self.q_scale, eps)
        k = kernels.rms_norm(k, self.k_scale, eps)
        b = kernels.activate(b, "sigmoid")
        b = b if self.spec.step_scale == 1 else kernels.multiply(b, self.spec.step_scale)
        decay = self._decays(a)
        y = kernels.scan(q, k, by_head(v, heads, self.value_dim), decay, b, None, self.pages, plan, "delta")
        y = pick(y.flatten(1), wanted)
        y = kernels.gated_norm(y, z, self.gate_weight, self.spec.norm.eps, self.value_dim, False, self.activation)
        return self.out(y, wanted_slots)

    def _decays(self, a: Tensor) -> Tensor:
        """Return the factors by which states decay. a: [tokens, heads * decays]"""
        if (bound := self.spec.decay_bound) is not None:
            bounded: Tensor = self.kernels.bounded_decays(a, self.dt_bias, self.rate, bound)
            return bounded
        decays: Tensor = self.kernels.time_steps(a, self.dt_bias, self.rate, 0.0, float("inf"))[1]
        return decays
