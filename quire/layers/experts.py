"""This rank's experts of a layer: one product for all of them, with rows sorted by expert."""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import DenseWeight, LinearMethod, LinearShape, LinearWeight, dense_slots, make_weight
from quire.layers.specs import MoESpec, OutputPart


class GroupedExperts:
    """One projection of all experts with dense weights: a grouped product over tokens sorted by expert."""

    lasting = "packed"

    def __init__(self, builder: Builder, num_experts: int, out_features: int, in_features: int, bias: bool) -> None:
        self.grouped_linear = builder.kernels.grouped_linear
        # After loading, in the form that the kernel reads fastest
        self.packed: Any = builder.parameter(num_experts, out_features, in_features)
        self.bias = builder.parameter(num_experts, out_features) if bias else None
        self.num_experts = num_experts
        self.out_features = out_features

    @property
    def weight(self) -> Tensor:
        """[experts, out, in]; once packed, an expert's elements are in the kernel's order"""
        if isinstance(self.packed, Tensor):
            return self.packed
        out: Tensor = self.packed.data.view(self.num_experts, self.out_features, -1)
        return out

    def pack(self) -> None:
        if (pack := getattr(self.grouped_linear, "pack", None)) is not None:
            self.packed = pack(self.packed)

    def drop_bias(self) -> None:
        self.bias = None

    def tensors_of(self, expert: int) -> list[Tensor]:
        """Return all tensors of one of this rank's experts."""
        return [self.weight[expert], *([] if self.bias is None else [self.bias[expert]])]

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x: [rows, in], where expert e has the rows offsets[e] : offsets[e + 1] -> [rows, out]"""
        out: Tensor = self.grouped_linear(x, self.packed, self.bias, offsets)
        return out


class SeparateExperts:
    """One projection of all experts, each with a separate (quantized) weight.

    If a kernel supports it and all weights have the same form, they are joined, and one product computes all experts.
    """

    lasting = "joined"

    def __init__(
        self, builder: Builder, weights: list[LinearWeight], out_features: int, bias: Tensor | None = None
    ) -> None:
        """bias: [experts, out]"""
        self.kernels = builder.kernels
        self.weights = weights
        self.out_features = out_features
        self.bias = bias
        self.joined: Any = None
        if hasattr(self.kernels.grouped_quantized_linear, "join"):
            builder.weights.append(self)
            builder.when_loaded(self._join, makes_lasting=True)

    def _join(self) -> None:
        pieces = [piece for weight in self.weights for piece in getattr(weight, "pieces", ())]
        if len(pieces) == len(self.weights):
            self.joined = self.kernels.grouped_quantized_linear.join(pieces)  # type: ignore[attr-defined]
        if self.joined is not None:
            for weight in self.weights:
                weight.pieces = []  # type: ignore[attr-defined]
            self.weights = []

    def drop_bias(self) -> None:
        self.bias = None

    def tensors_of(self, expert: int) -> list[Tensor]:
        """Return all tensors of one of this rank's experts."""
        bias = [] if self.bias is None else [self.bias[expert]]
        if self.joined is None:
            return [*_tensors(self.weights[expert]), *bias]
        outs = self.out_features
        return [*self.joined.rows(expert * outs, (expert + 1) * outs).by_row.values(), *bias]

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        if self.joined is not None:
            product: Tensor = self.kernels.grouped_quantized_linear(x, self.joined, self.bias, offsets)
            return product
        ends = offsets.tolist()
        out = x.new_empty(len(x), self.out_features)
        for e, (start, stop) in enumerate(pairwise(ends)):
            if stop > start:
                out[start:stop] = self.weights[e](x[start:stop], None if self.bias is None else self.bias[e])
        return out


Experts = GroupedExperts | SeparateExperts


def _dense_experts(
    builder: Builder, name: str, experts: GroupedExperts, scales: tuple[Tensor, list[int]] | None = None
) -> Experts:
    """Return experts that are dense in the checkpoint, quantized if the engine's options request it.

    Call it after their slots are recorded. name: the name of their tensor, or of one of their tensors. scales: the
    factors of all experts, [experts], and which experts these are.
    """
    if scales is not None:
        weight = experts.weight  # before it is packed
        factors, own = scales
        builder.when_loaded(lambda: _scale(weight, factors[own]), makes_lasting=True)
    quantizer = builder.quantizer_of(name)
    if quantizer is None:
        builder.weights.append(experts)
        builder.when_loaded(experts.pack, makes_lasting=True)
        return experts
    weights = [quantizer(builder, [weight].pop) for weight in experts.weight]
    return SeparateExperts(builder, weights, experts.weight.shape[1], experts.bias)


def _scale(weight: Tensor, factors: Tensor) -> None:
    """Multiply the weights of each expert by its factor. weight: [experts, out, in]; factors: [experts]"""
    weight.copy_(weight * factors[:, None, None])


def separate_experts(builder: Builder, shapes: list[LinearShape]) -> Experts:
    """Return the experts of a checkpoint with a tensor for each expert and projection. shapes: one for each local
    expert."""
    if any(builder.method_of(part.name) is not DenseWeight for shape in shapes for part in shape.parts):
        return SeparateExperts(builder, [make_weight(builder, shape) for shape in shapes], shapes[0].out_features)
    first = shapes[0]
    experts = GroupedExperts(builder, len(shapes), first.out_features, first.stop - first.start, bias=False)
    for weight, shape in zip(experts.weight, shapes, strict=True):
        dense_slots(builder, shape, weight)
    return _dense_experts(builder, first.parts[0].name, experts)


def fused_experts(
    builder: Builder,
    spec: MoESpec,
    hidden: int,
    names: dict[str, str],
    local: Sequence[int],
    inner: tuple[int, int],
    scales: Tensor | None = None,
) -> tuple[Experts, Experts]:
    """Return (gate_up, down) of a checkpoint with one tensor for all experts, see MoESpec.layout.

    local: the experts of this rank. inner: this rank's share [start, stop) of their inner elements. scales: [experts],
    by which the weights of `down` are multiplied once they are loaded.
    """
    start, stop = inner
    share = stop - start
    method = builder.method_of(names.get("experts_gate_up", names["experts_down"]).removesuffix(".weight"))
    if method is not DenseWeight:
        return _packed_experts(builder, method, spec, hidden, names, local, inner)
    gate_up = GroupedExperts(builder, len(local), 2 * share, hidden, spec.bias)
    down = GroupedExperts(builder, len(local), hidden, share, spec.bias)
    weights = (gate_up.weight, down.weight)
    if spec.layout == "rows":
        _experts_in_rows(builder, spec, names, local, start, weights)
    elif spec.layout == "stacked":
        _stacked_experts(builder, spec, names, local, start, weights)
    else:
        _transposed_experts(builder, spec, names, local, inner, (gate_up, down))
    projections = [
        _dense_experts(builder, names.get("experts_gate_up", names["experts_down"]), gate_up),
        _dense_experts(builder, names["experts_down"], down, None if scales is None else (scales, list(local))),
    ]
    if start > 0:  # the ranks that divide an expert add up their results, so only the first may add the bias
        builder.when_loaded(projections[1].drop_bias)
    return projections[0], projections[1]


def _transposed_experts(
    builder: Builder,
    spec: MoESpec,
    names: dict[str, str],
    local: Sequence[int],
    inner: tuple[int, int],
    projections: tuple[GroupedExperts, GroupedExperts],
) -> None:
    """Fill gate_up and down from tensors [experts, in, out], with their biases."""
    gate_up, down = projections
    count, size, (start, stop) = spec.num_experts, spec.intermediate_size, inner
    share = stop - start
    hidden = down.out_features
    for here, picked in _runs(local):
        for which in (0, 1):
            outputs = slice(which * share, (which + 1) * share)
            columns = slice(2 * start + which, 2 * stop, 2)
            if spec.layout == "fused_halves":
                columns = slice(which * size + start, which * size + stop)
            name = names["experts_gate_up"]
            pick = (picked, slice(None), columns)
            target = gate_up.weight[here, outputs]
            builder.part(name, target, (count, hidden, 2 * size), *pick, transposed=True, is_raw=True)
            if gate_up.bias is not None:
                builder.part(f"{name}_bias", gate_up.bias[here, outputs], (count, 2 * size), picked, columns)
        shape = (count, size, hidden)
        rows = slice(start, stop)
        builder.part(names["experts_down"], down.weight[here], shape, picked, rows, transposed=True, is_raw=True)
        if down.bias is not None:
            builder.part(f"{names['experts_down']}_bias", down.bias[here], (count, hidden), picked)


def _stacked_experts(
    builder: Builder,
    spec: MoESpec,
    names: dict[str, str],
    local: Sequence[int],
    start: int,
    weights: tuple[Tensor, Tensor],
) -> None:
    """Fill weights, gate_up and down, from tensors [experts, out, in]. start: the first of this rank's inner
    elements."""
    gate_up, down = weights
    count, size = spec.num_experts, spec.intermediate_size
    hidden, share = down.shape[1:]
    for here, picked in _runs(local):
        for which, key in enumerate(("experts_gate", "experts_up")):
            name, rows, first = names.get("experts_gate_up"), 2 * size, which * size + start
            if name is None:  # two tensors
                name, rows, first = names[key], size, start
            target = gate_up[here, which * share : (which + 1) * share]
            builder.part(name, target, (count, rows, hidden), picked, slice(first, first + share), is_raw=True)
        pick = (picked, slice(None), slice(start, start + share))
        builder.part(names["experts_down"], down[here], (count, hidden, size), *pick, is_raw=True)


def _experts_in_rows(
    builder: Builder,
    spec: MoESpec,
    names: dict[str, str],
    local: Sequence[int],
    start: int,
    weights: tuple[Tensor, Tensor],
) -> None:
    """Fill weights, gate_up and down, from tensors [experts * size, hidden], in which `down` is transposed. start: the
    first of this rank's inner elements."""
    gate_up, down = weights
    hidden, share = down.shape[1:]
    shape = (spec.num_experts * spec.intermediate_size, hidden)
    for here, expert in enumerate(local):
        first = expert * spec.intermediate_size + start
        rows = slice(first, first + share)
        builder.part(names["experts_gate"], gate_up[here, :share], shape, rows, is_raw=True)
        builder.part(names["experts_up"], gate_up[here, share:], shape, rows, is_raw=True)
        builder.part(names["experts_down"], down[here], shape, rows, transposed=True, is_raw=True)


def _packed_experts(
    builder: Builder,
    method: LinearMethod,
    spec: MoESpec,
    hidden: int,
    names: dict[str, str],
    local: Sequence[int],
    inner: tuple[int, int],
) -> tuple[Experts, Experts]:
    """Like `fused_experts`, for quantized tensors [experts, out, in]."""
    if not hasattr(method, "experts") or spec.layout in ("stacked", "rows"):
        raise ValueError(f"{names['experts_down']}: experts in one tensor cannot be quantized in this format")
    count, size, (start, stop) = spec.num_experts, spec.intermediate_size, inner
    halves = [slice(2 * start + which, 2 * stop, 2) for which in (0, 1)]
    if spec.layout == "fused_halves":
        halves = [slice(which * size + start, which * size + stop) for which in (0, 1)]
    up_parts = tuple(OutputPart(names["experts_gate_up"], 2 * size, start, stop) for _ in halves)
    down_part = OutputPart(names["experts_down"], hidden, 0, hidden)
    projections = []
    for shape, rows in (
        (LinearShape(up_parts, hidden, 0, hidden), halves),
        (LinearShape((down_part,), size, start, stop), [slice(0, hidden)]),
    ):
        name = shape.parts[0].name
        outs = shape.parts[0].rows
        runs = list(_runs(local))
        bias = builder.parameter(len(local), shape.out_features) if spec.bias else None
        for here, picked in runs if bias is not None else ():
            for i, pick in enumerate(rows):
                share = shape.out_features // len(rows)
                target = bias[here, i * share : (i + 1) * share]  # type: ignore[index]
                builder.part(f"{name}_bias", target, (count, outs), picked, pick)
        weights = method.experts(builder, name, count, shape, rows, runs)
        projections.append(SeparateExperts(builder, weights, shape.out_features, bias))
    if start > 0:
        builder.when_loaded(projections[1].drop_bias)
    return projections[0], projections[1]


def _tensors(weight: object) -> list[Tensor]:
    """Return the tensors of a weight, in the order of its attributes."""
    if isinstance(weight, Tensor):
        return [weight]
    parts: list[object] = []
    if isinstance(weight, list):
        parts = weight
    elif isinstance(weight, LinearWeight) or is_dataclass(weight):
        parts = list(vars(weight).values())
    return [tensor for part in parts for tensor in _tensors(part)]


def _runs(experts: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """[4, 5, 6, 0, 1] -> (0:3, 4:7), (3:5, 0:2): the places in the list and the values of runs of consecutive
    experts."""
    start = 0
    for end in range(1, len(experts) + 1):
        if end == len(experts) or experts[end] != experts[end - 1] + 1:
            yield slice(start, end), slice(experts[start], experts[end - 1] + 1)
            start = end
