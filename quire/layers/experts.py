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
    count, size, (start, stop) = spec.num_experts, spec.intermediate_size, inner
    share = stop - start
    everything = slice(None)
    of_both = names.get("experts_gate_up")  # or there are two tensors
    method = builder.method_of(names["experts_down"].removesuffix(".weight"))
    if method is not DenseWeight:
        return _packed_experts(builder, method, spec, hidden, names, local, inner)
    gate_up = GroupedExperts(builder, len(local), 2 * share, hidden, spec.bias)
    down = GroupedExperts(builder, len(local), hidden, share, spec.bias)
    for here, picked in _runs(local):
        for which in (0, 1):
            outputs = slice(which * share, (which + 1) * share)
            half = slice(which * size + start, which * size + stop)
            target = gate_up.weight[here, outputs]
            shape = (count, hidden, 2 * size)
            if of_both is None:
                name = names[("experts_gate", "experts_up")[which]]
                builder.part(name, target, (count, size, hidden), picked, slice(start, stop), is_raw=True)
                continue
            if spec.layout == "stacked":
                builder.part(of_both, target, (count, 2 * size, hidden), picked, half, is_raw=True)
                continue
            columns = half if spec.layout == "fused_halves" else slice(2 * start + which, 2 * stop, 2)
            columns_of_half = (picked, everything, columns)
            builder.part(of_both, target, shape, *columns_of_half, transposed=True, is_raw=True)
            if gate_up.bias is not None:
                name = f"{of_both}_bias"
                builder.part(name, gate_up.bias[here, outputs], (count, 2 * size), picked, columns)
        if spec.layout == "stacked":
            shape = (count, hidden, size)
            inputs = slice(start, stop)
            builder.part(names["experts_down"], down.weight[here], shape, picked, everything, inputs, is_raw=True)
            continue
        shape = (count, size, hidden)
        pick = (picked, slice(start, stop))
        builder.part(names["experts_down"], down.weight[here], shape, *pick, transposed=True, is_raw=True)
        if down.bias is not None:
            builder.part(f"{names['experts_down']}_bias", down.bias[here], (count, hidden), picked)
    projections = [
        _dense_experts(builder, of_both or names["experts_gate"], gate_up),
        _dense_experts(builder, names["experts_down"], down, None if scales is None else (scales, list(local))),
    ]
    if start > 0:  # the ranks that divide an expert add up their results, so only the first may add the bias
        builder.when_loaded(projections[1].drop_bias)
    return projections[0], projections[1]


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
    if not hasattr(method, "experts") or spec.layout == "stacked":
        raise ValueError(f"{names['experts_gate_up']}: experts in one tensor cannot be quantized in this format")
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
