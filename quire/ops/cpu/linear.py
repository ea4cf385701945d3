"""Matrix products: from weights in panels (linear.cpp), and those of experts (grouped_linear.cpp)."""

import torch
from torch import Tensor

from quire.ops.cpu.build import kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.cpu.panels import Panels
from quire.ops.reference.elementwise import grouped_linear, linear
from quire.ops.registry import Target

_MANY_ROWS = 32  # an expert, on average: then a product by torch for each is faster


def on_cpu_in_bfloat16(target: Target) -> bool:
    return on_cpu(target) and target.dtype is torch.bfloat16


@linear.implementation("cpu", supports=on_cpu_in_bfloat16)
def linear_cpu(x: Tensor, weight: Tensor | Panels, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):  # nobody packed it
        return torch.nn.functional.linear(x, weight, bias)
    rows, columns = x.shape
    x = torch.nn.functional.pad(x, (0, 1)) if columns % 2 else x
    stride, last = x.stride()
    if last != 1:
        x, stride = x.contiguous(), x.shape[1]
    out = x.new_empty(rows, weight.rows)
    kernel("quire_linear", "pllpllppi")(
        x.data_ptr(), stride, rows, weight.data.data_ptr(), weight.rows, weight.words,
        None if bias is None else bias.data_ptr(), out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


linear_cpu.pack, linear_cpu.rows = Panels.of, Panels.pick  # type: ignore[attr-defined]


@grouped_linear.implementation("cpu", supports=on_cpu)
def grouped_linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    rows, experts = len(x), len(weight)
    out_features, in_features = weight.shape[1:]
    if rows >= _MANY_ROWS * experts or weight.stride(2) != 1 or weight.dtype is not x.dtype:
        return grouped_linear.reference(x, weight, bias, offsets)  # type: ignore[no-any-return]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(rows, out_features)
    kernel("quire_grouped_linear", "iplpllpplllpi")(
        x.dtype is torch.bfloat16, x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), weight.stride(1),
        None if bias is None else bias.data_ptr(), offsets.data_ptr(), experts, in_features, out_features,
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out
