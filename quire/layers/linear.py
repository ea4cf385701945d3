"""Linear layers, split over a tensor group by rows (column parallel) or by columns (row parallel) of the weight.

The split follows Megatron-LM (arXiv:1909.08053): column parallel first, row parallel second, one all-reduce a pair.
"""

from dataclasses import dataclass

from torch import Tensor

from quire.layers.build import Builder


@dataclass(frozen=True)
class OutputPart:
    """Rows [start, stop) of the checkpoint tensor `name`.weight (and .bias), which has `rows` rows in all."""

    name: str
    rows: int
    start: int
    stop: int


class ColumnParallelLinear:
    """y = x W^T + b with the outputs split over ranks; several checkpoint tensors may be fused into one product."""

    def __init__(self, builder: Builder, in_features: int, parts: list[OutputPart], bias: bool = False) -> None:
        self.linear = builder.kernels.linear
        builder.linears.append(self)
        out_features = sum(p.stop - p.start for p in parts)
        self.weight = builder.parameter(out_features, in_features)
        self.bias = builder.parameter(out_features) if bias else None
        offset = 0
        for p in parts:
            end = offset + p.stop - p.start
            shape = (p.rows, in_features)
            builder.part(f"{p.name}.weight", self.weight[offset:end], shape, 0, p.start, p.stop)
            if self.bias is not None:
                builder.part(f"{p.name}.bias", self.bias[offset:end], (p.rows,), 0, p.start, p.stop)
            offset = end

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in_features] -> [tokens, this rank's outputs]"""
        out: Tensor = self.linear(x, self.weight, self.bias)
        return out


class RowParallelLinear:
    """y = x W^T + b with the inputs split over ranks: each computes a summand of the whole output."""

    def __init__(
        self, builder: Builder, name: str, in_features: int, out_features: int, bias: bool = False, unit: int = 1
    ) -> None:
        """unit: inputs that stay together (a head's size)."""
        self.linear = builder.kernels.linear
        builder.linears.append(self)
        self.group = builder.tensor_group
        start, stop = (bound * unit for bound in self.group.share(in_features // unit))
        self.weight = builder.parameter(out_features, stop - start)
        builder.part(f"{name}.weight", self.weight, (out_features, in_features), 1, start, stop)
        self.bias = builder.whole(f"{name}.bias", out_features) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, this rank's inputs] -> [tokens, out_features], the sum over ranks"""
        if self.group.size == 1:
            out: Tensor = self.linear(x, self.weight, self.bias)
            return out
        out = self.group.all_reduce(self.linear(x, self.weight, None))
        return out if self.bias is None else out + self.bias
