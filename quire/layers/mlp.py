"""The dense feed-forward layer."""

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows, inner_share
from quire.layers.qk_norm import RMSNormOfAllHeads
from quire.layers.specs import MLPSpec, OutputPart
from quire.layers.xielu import XIELU
from quire.ops import Kernels

Activation = Callable[[Tensor], Any]  # the result is Rows

_PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
_SAME = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
}  # transformers' names


def activation(kernels: Kernels, name: str, gated: bool, swiglu: tuple[float, float] = (1.702, 7.0)) -> Activation:
    """Return the activation function called `name`. If gated, [tokens, 2 * half] -> act(first half) * second half.

    Raises ValueError for an unknown name.
    """
    name = _SAME.get(name, name)
    if gated:
        fused: dict[str, Activation] = {
            "silu": kernels.silu_and_mul,
            "gelu": kernels.gelu_and_mul,
            "gelu_tanh": partial(kernels.gelu_and_mul, approximate="tanh"),
            "relu": kernels.relu_and_mul,
            "relu2": partial(kernels.relu_and_mul, squared=True),
            "swiglu_oai": partial(kernels.swiglu_oai, alpha=swiglu[0], limit=swiglu[1]),
            "limited_swiglu": partial(kernels.limited_swiglu, limit=swiglu[1]),
            "swiglu_step": partial(kernels.limited_swiglu, limit=swiglu[1], after=True),
        }
        if name in fused:
            return fused[name]
    elif name in _PLAIN:
        return partial(kernels.activate, name=name)
    raise ValueError(f"activation {name!r} is not supported; supported: {', '.join(sorted({*_PLAIN, *_SAME}))}")


class MLP:
    """The dense feed-forward layer. names: the names of gate and up, or of gate_up or up_gate (both in one); and of
    down."""

    def __init__(self, builder: Builder, spec: MLPSpec, hidden: int, names: dict[str, str]) -> None:
        size = spec.intermediate_size
        start, stop = inner_share(builder, size, names["down"])
        (gate_scale, self.down_scale), self.kernels, self.factors = spec.multipliers, builder.kernels, None
        if gate_scale != 1:
            self.factors = torch.ones(2 * (stop - start), dtype=torch.float32, device=builder.device)
            self.factors[: stop - start] = gate_scale
        if not spec.gated:
            parts = [OutputPart(names["up"], size, start, stop)]
        elif fused := names.get("gate_up") or names.get("up_gate"):
            parts = [OutputPart(fused, 2 * size, start, stop), OutputPart(fused, 2 * size, size + start, size + stop)]
            parts = parts if "gate_up" in names else parts[::-1]
        else:
            parts = [OutputPart(names[key], size, start, stop) for key in ("gate", "up")]
        self.up = ColumnParallelLinear(builder, hidden, parts, spec.bias, spec.transposed)
        self.activation: Activation
        if spec.activation == "xielu" and "activation" in names:
            self.activation = XIELU(builder, names["activation"])
        else:
            self.activation = activation(builder.kernels, spec.activation, spec.gated, spec.swiglu)
        self.size = size
        self.group = builder.tensor_group
        self.cutoff = NormalDist().inv_cdf(spec.sparsity) if spec.sparsity else None
        self.sub_norm = None
        if spec.sub_norm is not None:
            inner = range(start, stop)
            self.sub_norm = RMSNormOfAllHeads(builder, names["mlp_sub_norm"], spec.sub_norm, 1, size, inner, 1.0)
        down_bias = spec.bias or spec.down_bias
        self.down = RowParallelLinear(builder, names["down"], size, (start, stop), hidden, down_bias, spec.transposed)
        if self.activation is self.kernels.silu_and_mul and self.sub_norm is None:
            builder.when_loaded(self._round_for_down)

    def _round_for_down(self) -> None:
        """Let the activation round its results to 8 bits, if the next product does so."""
        if (code := self.down.rounding()) is not None:
            self.activation = partial(self.kernels.silu_and_mul_rounded, code=code)

    def __call__(self, x: Rows, slots: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden], this rank's summand. slots: the slots of the tokens' adapters."""
        up = self.up(x, slots)
        if self.factors is not None:
            up = self.kernels.multiply(up, self.factors)
        if self.cutoff is not None:
            up = self._sparse(up)
        inner = self.activation(up)
        if self.sub_norm is not None:
            inner = self.sub_norm(inner[..., None])[..., 0]
        down = self.down(inner, slots)
        return down if self.down_scale == 1 else self.kernels.multiply(down, self.down_scale)

    def _sparse(self, up: Tensor) -> Tensor:
        """Reduce the gates by a number of standard deviations above their mean, and set negative ones to 0. up: gates
        and the other half, [tokens, 2 * inner]"""
        assert self.cutoff is not None
        gates, others = up.chunk(2, 1)
        mean = self.group.all_reduce(gates.float().sum(1, keepdim=True)) / self.size
        deviation = (self.group.all_reduce((gates - mean).square().sum(1, keepdim=True)) / self.size).sqrt()
        return torch.cat((torch.relu(gates - (mean + self.cutoff * deviation).to(up.dtype)), others), 1)
