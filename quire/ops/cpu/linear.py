"""Matrix products: oneDNN's, from weights that were packed for it once, and those of experts, in grouped_linear.cpp."""

import torch
from torch import Tensor

from quire.ops.cpu.build import kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.reference.elementwise import grouped_linear, linear
from quire.ops.registry import Target

_MANY_ROWS = 32  # an expert, on average: then a product by oneDNN for each is faster


def _supports(target: Target) -> bool:
    return (
        target.device.type == "cpu"
        and target.dtype == torch.bfloat16
        and bool(torch._C._has_mkldnn)
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@linear.implementation("onednn", supports=_supports)
def linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not weight.is_mkldnn:  # nobody packed it
        return torch.nn.functional.linear(x, weight, bias)
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


linear_onednn.pack = _pack  # type: ignore[attr-defined]


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
