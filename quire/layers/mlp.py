"""The dense feed-forward layer."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from quire.layers.build import Builder
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear, inner_share
from quire.layers.qk_norm import RMSNormOfAllHeads
from quire.layers.specs import MLPSpec, OutputPart
from quire.layers.xielu import XIELU
from quire.ops import Kernels

Activation = Callable[[Tensor], Tensor]

_PLAIN: dict[str, Activation] = {"relu": functional.relu, "relu2": lambda x: functional.relu(x).square()}
_SAME = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
}  # transformers' names


def activation(kernels: Kernels, name: str, gated: bool, swiglu: tuple[float, float] = (1.702, 7.0)) -> Activation:
    """The activation function called `name`. If gated, [tokens, 2 * half] -> act(first half) * second half.

    Raises ValueError for an unknown name.
    """
    name = _SAME.get(name, name)
    if gated:
        fused: dict[str, Activation] = {
            "silu": kernels.silu_and_mul,
            "gelu": kernels.gelu_and_mul,
            "gelu_tanh": partial(kernels.gelu_and_mul, approximate="tanh"),
            "swiglu_oai": partial(kernels.swiglu_oai, alpha=swiglu[0], limit=swiglu[1]),
        }
        if name in fused:
            return fused[name]
    # torch's own silu and gelu_tanh depend on an element's place: at the end of a tensor, results may differ by a bit.
    by_name: dict[str, Activation] = {
        **_PLAIN,
        **{key: partial(kernels.activate, name=key) for key in ("silu", "gelu", "gelu_tanh")},
    }
    if name not in by_name:
        raise ValueError(f"activation {name!r} is not supported; supported: {', '.join(sorted({*by_name, *_SAME}))}")
    plain = by_name[name]
    return _gated(plain) if gated else plain


def _gated(plain: Activation) -> Activation:
    def function(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return plain(gate) * up

    return function


class MLP:
    """The dense feed-forward layer. names: of gate and up, or of gate_up or up_gate, which hold both; and of down."""

    def __init__(self, builder: Builder, spec: MLPSpec, hidden: int, names: dict[str, str]) -> None:
        size = spec.intermediate_size
        start, stop = inner_share(builder, size, names["down"])
        (self.gate_scale, self.down_scale), self.inner = spec.multipliers, stop - start
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
            self.activation = activation(builder.kernels, spec.activation, spec.gated)
        self.sub_norm = None
        if spec.sub_norm is not None:
            inner = range(start, stop)
            self.sub_norm = RMSNormOfAllHeads(builder, names["mlp_sub_norm"], spec.sub_norm, 1, size, inner, 1.0)
        down_bias = spec.bias or spec.down_bias
        self.down = RowParallelLinear(builder, names["down"], size, (start, stop), hidden, down_bias, spec.transposed)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden], this rank's summand"""
        up = self.up(x)
        if self.gate_scale != 1:
            up[:, : self.inner] *= self.gate_scale
        inner = self.activation(up)
        if self.sub_norm is not None:
            inner = self.sub_norm(inner[..., None])[..., 0]
        down = self.down(inner)
        return down if self.down_scale == 1 else down * self.down_scale
