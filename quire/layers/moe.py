"""Mixture of experts: a router chooses experts for each token, and each expert computes all its tokens at once."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.config.experts import All2All
from quire.layers.build import Builder
from quire.layers.deep_ep import DeepEP
from quire.layers.deep_ep_low_latency import DeepEPLowLatency
from quire.layers.dispatch import Dispatch, Everywhere, Exchanged, Replicated, Routed
from quire.layers.experts import fused_experts, separate_experts
from quire.layers.fixed_dispatch import Gathered
from quire.layers.linear import LinearShape, ReplicatedLinear, inner_share, make_weight
from quire.layers.lora import LowRank, slots_of_copies
from quire.layers.mlp import MLP, activation
from quire.layers.specs import MoESpec, OutputPart
from quire.layers.symmetric_dispatch import Symmetric
from quire.ops.reference.routing import Routing, weigh

_EXCHANGES: dict[All2All, type[Exchanged]] = {
    "all_to_all": Exchanged,
    "allgather_reducescatter": Gathered,
    "deepep_high_throughput": DeepEP,
    "deepep_low_latency": DeepEPLowLatency,
    "symmetric_memory": Symmetric,
}


def make_dispatch(builder: Builder, num_experts: int) -> Dispatch:
    """Return the dispatch for a layer with `num_experts` experts."""
    ranks = builder.experts
    if ranks is None:
        return Everywhere(builder, num_experts)
    if ranks.replicated:
        return Replicated(builder, ranks, num_experts)
    return _EXCHANGES[ranks.backend](builder, ranks, num_experts)


def _as_saved(builder: Builder, spec: MoESpec, hidden: int, names: dict[str, str]) -> MoESpec:
    """Return the spec with the checkpoint's layout. For some models, transformers 5 saves checkpoints in another layout
    than the published one."""
    shape = builder.shape_of(names["experts_gate_up"])
    if shape is None:
        return replace(spec, layout="separate")
    is_stacked = shape == (spec.num_experts, 2 * spec.intermediate_size, hidden)
    return replace(spec, layout="stacked") if is_stacked else spec


class MoE:
    """A mixture of experts.

    names: the names of router and correction_bias; of expert_gate, expert_up and expert_down with {e} for the expert,
    or of experts_gate_up (or experts_gate and experts_up) and experts_down for all experts, or of both if the
    checkpoint decides; of shared_gate and shared_up, or of shared_gate_up; of shared_down and shared_expert_gate; of
    latent_in and latent_out; of experts_bias, which is added to the sum of the experts' results; and of expert_scales,
    if experts are apart.
    """

    def __init__(self, builder: Builder, spec: MoESpec, hidden: int, names: dict[str, str]) -> None:
        spec.check()
        if spec.layout != "separate" and "expert_gate" in names:
            spec = _as_saved(builder, spec, hidden, names)
        self.spec = spec
        self.kernels = builder.kernels
        self._make_router(builder, spec, hidden, names)
        self.activation = activation(builder.kernels, spec.activation, spec.gated, spec.swiglu)
        inputs = self._latent(builder, spec, hidden, names)
        self.dispatch = make_dispatch(builder, spec.num_experts)
        self.loads: Tensor | None = None  # [experts]: the number of tokens that chose each expert
        if builder.experts is not None and builder.experts.measures:
            self.loads = torch.zeros(spec.num_experts, dtype=torch.int64, device=builder.device)
        self.out_bias = builder.whole(names["experts_bias"], hidden) if "experts_bias" in names else None
        if builder.tensor_group.rank > 0:
            builder.when_loaded(self._drop_bias)
        self.adapters: list[LowRank] = []  # for gate_up and for down
        is_fused = spec.layout != "separate"
        inner = (0, spec.intermediate_size)  # each expert is whole on one rank, or each rank has a share of it
        if builder.experts is None:
            reader = names["experts_down" if is_fused else "expert_down"].replace("{e}", "0")
            inner = inner_share(builder, spec.intermediate_size, reader)
        if is_fused:
            scales = (
                builder.whole(names["expert_scales"], spec.num_experts, dtype=torch.float32) if spec.apart else None
            )
            self.gate_up, self.down = fused_experts(builder, spec, hidden, names, self.dispatch.local, inner, scales)
        if "expert_up" in names:
            self._separate(builder, inputs, names, inner, is_fused)
        self.shared = self.shared_gate = None
        if spec.shared is not None:
            keys = ("gate", "up", "gate_up", "down")
            shared = {key: names[f"shared_{key}"] for key in keys if f"shared_{key}" in names}
            self.shared = MLP(builder, spec.shared, hidden, shared)
            if spec.shared_gate:
                self.shared_gate = ReplicatedLinear(builder, names["shared_expert_gate"], hidden, 1)

    def _make_router(self, builder: Builder, spec: MoESpec, hidden: int, names: dict[str, str]) -> None:
        self.router = ReplicatedLinear(builder, names["router"], hidden, spec.num_experts, spec.bias)
        self.correction_bias: Tensor | None = None
        if spec.correction_bias:
            shape = (1, spec.num_experts) if spec.correction_bias == "row" else (spec.num_experts,)
            self.correction_bias = builder.whole(names["correction_bias"], *shape, dtype=torch.float32)
        self.table: Tensor | None = None  # of the experts of each token id
        if spec.hashed:
            self.table = builder.whole(names["expert_table"], spec.hashed, spec.top_k, dtype=torch.int64)
        self.routing = Routing(
            spec.top_k,
            spec.scoring,
            spec.jitter,
            spec.normalize,
            spec.scale,
            spec.groups,
            spec.topk_groups,
            spec.group_score,
        )

    def _latent(self, builder: Builder, spec: MoESpec, hidden: int, names: dict[str, str]) -> int:
        """Make the projections before and after the experts. Returns the width of the experts' inputs."""
        self.latent_in = self.latent_out = None
        if not spec.latent_size:
            return hidden
        self.latent_in = ReplicatedLinear(builder, names["latent_in"], hidden, spec.latent_size)
        self.latent_out = ReplicatedLinear(builder, names["latent_out"], spec.latent_size, hidden)
        return spec.latent_size

    def _separate(
        self, builder: Builder, hidden: int, names: dict[str, str], inner: tuple[int, int], is_fused: bool
    ) -> None:
        """Make the parts that have a name for each expert: the adapters and, unless is_fused, gate_up and down. Records
        which of their tensors other ranks have."""
        size, (start, stop) = self.spec.intermediate_size, inner

        def shapes(expert: int) -> tuple[LinearShape, LinearShape]:
            keys = ("gate", "up") if self.spec.gated else ("up",)
            name = {key: names[f"expert_{key}"].replace("{e}", str(expert)) for key in (*keys, "down")}
            ups = tuple(OutputPart(name[key], size, start, stop) for key in keys)
            down = OutputPart(name["down"], hidden, 0, hidden)
            return LinearShape(ups, hidden, 0, hidden), LinearShape((down,), size, start, stop)

        here = [shapes(expert) for expert in self.dispatch.local]
        ups = [up for up, _ in here]
        downs = [down for _, down in here]
        if not is_fused:
            for expert in set(range(self.spec.num_experts)) - set(self.dispatch.local):
                for shape in shapes(expert):
                    make_weight(builder.elsewhere, shape)
            self.gate_up, self.down = separate_experts(builder, ups), separate_experts(builder, downs)
        if builder.adapters is not None and builder.adapters.change([*ups, *downs]):
            shared = self.dispatch.exchanges
            self.adapters = [LowRank(builder, builder.adapters, shapes, is_shared=shared) for shapes in (ups, downs)]

    def __call__(
        self, x: Tensor, slots: Tensor | None = None, to_router: Tensor | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden], this rank's summand. slots: the slots of the tokens' adapters.
        to_router: the router's input if it is not x. ids: of the tokens, if these decide the experts."""
        own = self.dispatch.own(x)
        own_slots = None if slots is None else self.dispatch.own(slots)
        logits = self.router(own if to_router is None else self.dispatch.own(to_router), own_slots)
        if self.table is None:
            weights, experts = self.kernels.choose_experts(logits, self.correction_bias, self.routing)
        else:
            assert ids is not None
            experts = self.table[self.dispatch.own(ids)]
            weights = weigh(logits, experts, self.routing)
        if self.latent_in is not None:
            own = self.latent_in(own, own_slots)
        if self.spec.weigh_inputs:
            own = self.kernels.multiply(own, weights)
            weights = None
        if self.loads is not None:
            chosen = experts.flatten()
            self.loads.index_add_(0, chosen, torch.ones_like(chosen))  # bincount would wait for the device
        sent = self.dispatch.send(own, experts, weights, len(x), self._sent_slots(own, own_slots))
        shared = self._shared(x, slots)  # overlaps with the exchange of tokens
        routed = sent.collect(self._compute(sent.receive(), slots))
        if self.latent_out is not None:
            routed = self.latent_out(routed, slots)
        if self.out_bias is not None:
            routed = routed + self.out_bias
        return routed if shared is None else self.kernels.add(routed, shared, routed)

    def _drop_bias(self) -> None:
        self.out_bias = None

    def _sent_slots(self, own: Tensor, slots: Tensor | None) -> Tensor | None:
        """Return the shared adapter slots that are sent with own tokens; None if experts of other ranks have none."""
        if not self.adapters or not self.dispatch.exchanges:
            return None
        if slots is None:
            return torch.full((len(own),), -1, device=own.device)
        return torch.where(slots < 0, -1, slots + self.adapters[0].first_slot)

    def _compute(self, routed: Routed, slots: Tensor | None) -> Tensor:
        """Return the results of this rank's experts, [rows, hidden]. slots: the adapter slots of the step's tokens."""
        slots = slots if routed.adapters is None else routed.adapters
        if slots is None or not self.adapters:
            return self.down(self.activation(self.gate_up(routed.rows, routed.offsets)), routed.offsets)
        tokens, experts = (part[: len(routed.rows)] for part in routed.origins())
        of_rows = slots_of_copies(slots, len(self.dispatch.local), tokens, experts)
        of_gate_up, of_down = self.adapters
        inner = self.activation(of_gate_up.add(self.gate_up(routed.rows, routed.offsets), routed.rows, of_rows))
        return of_down.add(self.down(inner, routed.offsets), inner, of_rows)

    def _shared(self, x: Tensor, slots: Tensor | None) -> Tensor | None:
        """Return this rank's summand of the shared expert's result, if there is a shared expert."""
        if self.shared is None or self.spec.apart:
            return None
        shared = self.shared(x, slots)
        if self.shared_gate is None:
            return shared
        gated: Tensor = self.kernels.multiply(shared, self.kernels.activate(self.shared_gate(x, slots), "sigmoid"))
        return gated

    def expert(self, index: int) -> list[Tensor]:
        """Return all tensors of the expert in one of this rank's slots."""
        return self.gate_up.tensors_of(index) + self.down.tensors_of(index)
