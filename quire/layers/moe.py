"""Mixture of experts: a router chooses experts for each token, and each expert computes all its tokens at once."""

from itertools import pairwise

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import (
    DenseWeight,
    LinearShape,
    LinearWeight,
    ReplicatedLinear,
    dense_slots,
    inner_share,
    make_weight,
)
from quire.layers.lora import LowRank
from quire.layers.mlp import MLP, activation
from quire.layers.specs import MoESpec, OutputPart
from quire.ops.reference.quantized import QuantizedMatrix, concatenate


class GroupedExperts:
    """One projection of all experts with dense weights: a grouped product over tokens sorted by expert."""

    def __init__(self, builder: Builder, num_experts: int, out_features: int, in_features: int, bias: bool) -> None:
        self.grouped_linear = builder.kernels.grouped_linear
        self.weight = builder.parameter(num_experts, out_features, in_features)
        self.bias = builder.parameter(num_experts, out_features) if bias else None

    def drop_bias(self) -> None:
        self.bias = None

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x: [rows, in], where expert e has the rows offsets[e] : offsets[e + 1] -> [rows, out]"""
        out: Tensor = self.grouped_linear(x, self.weight, self.bias, offsets)
        return out


class SeparateExperts:
    """One projection of all experts, each with a (quantized) weight of its own.

    If there is a kernel for it and all weights have the same form, they are concatenated, for one product of all.
    """

    def __init__(
        self, builder: Builder, weights: list[LinearWeight], out_features: int, bias: Tensor | None = None
    ) -> None:
        """bias: [experts, out]"""
        self.kernels, self.weights, self.out_features, self.bias = builder.kernels, weights, out_features, bias
        self.concatenated: QuantizedMatrix | None = None
        if self.kernels.chosen["grouped_quantized_linear"] != "reference":
            builder.when_loaded(self._concatenate)

    def _concatenate(self) -> None:
        pieces = [piece for weight in self.weights for piece in getattr(weight, "pieces", ())]
        matrices = [piece for piece in pieces if isinstance(piece, QuantizedMatrix)]
        if len(matrices) == len(pieces) == len(self.weights):
            merged = concatenate(matrices)
            if len(merged) == 1:
                pack = getattr(self.kernels.quantized_linear, "pack", None)
                self.concatenated, self.weights = merged[0] if pack is None else pack(merged[0]), []

    def drop_bias(self) -> None:
        self.bias = None

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        if self.concatenated is not None:
            product: Tensor = self.kernels.grouped_quantized_linear(x, self.concatenated, self.bias, offsets)
            return product
        ends, out = offsets.tolist(), x.new_empty(len(x), self.out_features)
        for e, (start, stop) in enumerate(pairwise(ends)):
            if stop > start:
                out[start:stop] = self.weights[e](x[start:stop], None if self.bias is None else self.bias[e])
        return out


Experts = GroupedExperts | SeparateExperts


def _dense_experts(builder: Builder, name: str, experts: GroupedExperts) -> Experts:
    """Experts that the checkpoint keeps dense, quantized if the engine's options say so.

    To be called after their slots are noted. name: of their tensors, or of one of them.
    """
    quantizer = builder.quantizer_of(name)
    if quantizer is None:
        return experts
    weights = [quantizer(builder, [weight].pop) for weight in experts.weight]
    return SeparateExperts(builder, weights, experts.weight.shape[1], experts.bias)


def _separate(builder: Builder, shapes: list[LinearShape]) -> Experts:
    """The experts of a checkpoint with a tensor for each expert and projection. shapes: one for each expert."""
    if any(builder.method_of(part.name) is not DenseWeight for shape in shapes for part in shape.parts):
        return SeparateExperts(builder, [make_weight(builder, shape) for shape in shapes], shapes[0].out_features)
    first = shapes[0]
    experts = GroupedExperts(builder, len(shapes), first.out_features, first.stop - first.start, bias=False)
    for weight, shape in zip(experts.weight, shapes, strict=True):
        dense_slots(builder, shape, weight)
    return _dense_experts(builder, first.parts[0].name, experts)


def _fused(builder: Builder, spec: MoESpec, hidden: int, names: dict[str, str]) -> tuple[Experts, Experts]:
    """(gate_up, down) of a checkpoint with one tensor [experts, in, out] for all experts; gate and up alternate."""
    count, size = spec.num_experts, spec.intermediate_size
    start, stop = inner_share(builder.tensor_group, size)
    share, everything = stop - start, slice(None)
    gate_up = GroupedExperts(builder, count, 2 * share, hidden, spec.bias)
    down = GroupedExperts(builder, count, hidden, share, spec.bias)
    for which in (0, 1):
        outputs, columns = slice(which * share, (which + 1) * share), slice(2 * start + which, 2 * stop, 2)
        target, shape = gate_up.weight[:, outputs], (count, hidden, 2 * size)
        builder.part(names["experts_gate_up"], target, shape, everything, everything, columns, transposed=True)
        if gate_up.bias is not None:
            name = f"{names['experts_gate_up']}_bias"
            builder.part(name, gate_up.bias[:, outputs], (count, 2 * size), everything, columns)
    shape = (count, size, hidden)
    builder.part(names["experts_down"], down.weight, shape, everything, slice(start, stop), transposed=True)
    if down.bias is not None:
        builder.part(f"{names['experts_down']}_bias", down.bias, (count, hidden))
    projections = [
        _dense_experts(builder, names[key], experts)
        for key, experts in (("experts_gate_up", gate_up), ("experts_down", down))
    ]
    if builder.tensor_group.rank > 0:  # the ranks' results are added up, so only one may add the bias
        builder.when_loaded(projections[1].drop_bias)
    return projections[0], projections[1]


class MoE:
    """A mixture of experts.

    names: of router and correction_bias; of expert_gate, expert_up and expert_down with {e} for the expert, or of
    experts_gate_up and experts_down for all; of shared_gate, shared_up, shared_down and shared_expert_gate.
    """

    def __init__(self, builder: Builder, spec: MoESpec, hidden: int, names: dict[str, str]) -> None:
        self.spec, self.group, self.kernels = spec, builder.tensor_group, builder.kernels
        self.router = ReplicatedLinear(builder, names["router"], hidden, spec.num_experts, spec.bias)
        self.correction_bias = None
        if spec.correction_bias:
            self.correction_bias = builder.whole(names["correction_bias"], spec.num_experts, dtype=torch.float32)
        self.activation = activation(builder.kernels, spec.activation, True, spec.swiglu)
        self.bounds = torch.arange(spec.num_experts + 1, device=builder.device)
        self.adapters: list[LowRank] = []  # of gate_up and of down
        if spec.layout == "fused":
            self.gate_up, self.down = _fused(builder, spec, hidden, names)
        else:
            size = spec.intermediate_size
            start, stop = inner_share(self.group, size)

            def name(key: str, expert: int) -> str:
                return names[key].replace("{e}", str(expert))

            up_shapes, down_shapes = [], []
            for e in range(spec.num_experts):
                parts = [OutputPart(name(key, e), size, start, stop) for key in ("expert_gate", "expert_up")]
                up_shapes.append(LinearShape(tuple(parts), hidden, 0, hidden))
                parts = [OutputPart(name("expert_down", e), hidden, 0, hidden)]
                down_shapes.append(LinearShape(tuple(parts), size, start, stop))
            self.gate_up, self.down = _separate(builder, up_shapes), _separate(builder, down_shapes)
            if builder.adapters is not None:
                self.adapters = [LowRank(builder, builder.adapters, shapes) for shapes in (up_shapes, down_shapes)]
        self.shared = self.shared_gate = None
        if spec.shared is not None:
            shared = {key: names[f"shared_{key}"] for key in ("gate", "up", "down")}
            self.shared = MLP(builder, spec.shared, hidden, shared)
            if spec.shared_gate:
                self.shared_gate = ReplicatedLinear(builder, names["shared_expert_gate"], hidden, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]"""
        weights, experts = self.route(x)  # [tokens, top_k]
        sorted_experts, order = experts.flatten().sort(stable=True)
        offsets = torch.searchsorted(sorted_experts, self.bounds)
        given, slots = x[order // self.spec.top_k], None
        if self.adapters:
            slots = self.adapters[0].slots.of_copies(x, self.spec.num_experts, order // self.spec.top_k, sorted_experts)
        out = self.gate_up(given, offsets)
        if slots is not None:
            self.adapters[0].add_rows(out, given, slots)
        given = self.activation(out)
        out = self.down(given, offsets)
        if slots is not None:
            self.adapters[1].add_rows(out, given, slots)
        routed = self.group.all_reduce(self.kernels.combine_experts(out, order, weights))
        if self.shared is None:
            return routed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * self.kernels.activate(self.shared_gate(x), "sigmoid")
        return routed + shared

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden] -> the chosen experts' weights (float32) and ids: [tokens, top_k]"""
        spec = self.spec
        logits = self.router(x).float()
        scores = logits.softmax(-1) if spec.scoring == "softmax" else self.kernels.activate(logits, "sigmoid")
        choice = scores if self.correction_bias is None else scores + self.correction_bias
        if spec.groups > 1:
            grouped = choice.view(len(x), spec.groups, choice.shape[1] // spec.groups)
            best = grouped.topk(1 if spec.group_score == "best" else 2, dim=-1).values.sum(-1)
            excluded = torch.ones_like(best, dtype=torch.bool).scatter_(
                1, best.topk(spec.topk_groups, dim=-1).indices, False
            )
            choice = grouped.masked_fill(excluded[:, :, None], float("-inf")).flatten(1)
        experts = choice.topk(spec.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if spec.normalize:
            weights = weights / (self.kernels.row_sums(weights) + 1e-20)
        return weights * spec.scale, experts
