"""Matrix products by oneDNN, from weights that were packed for it once: faster, most of all with few rows."""

import torch
from torch import Tensor

from quire.ops.reference.elementwise import linear
from quire.ops.registry import Target


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
