"""Matrix products with weights in panels (linear.cpp) and with the weights of experts (grouped_linear.cpp)."""

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.cpu.panels import PANEL, Panels
from quire.ops.reference.elementwise import combine_experts, grouped_linear, linear, linear_by_head


def check_width(given: int, expected: int) -> None:
    """Raise ValueError if the widths differ, since the kernels would read past the end of the rows."""
    if given != expected:
        raise ValueError(f"a product with weights for {expected} inputs got {given}")


@linear.implementation("cpu", supports=on_cpu)
def linear_cpu(x: Tensor, weight: Tensor | Panels, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):  # not packed
        return torch.nn.functional.linear(x, weight, bias)
    return _multiply(x, weight, bias, weight.rows, None)


def _multiply(x: Tensor, weight: Panels, bias: Tensor | None, outs: int, offsets: Tensor | None) -> Tensor:
    """outs, offsets: the outputs and rows of each expert, if there are several."""
    rows, columns = x.shape
    check_width(columns, weight.columns)
    x = torch.nn.functional.pad(x, (0, 1)) if x.itemsize == 2 and columns % 2 else x
    stride, last = x.stride()
    if last != 1:
        x, stride = x.contiguous(), x.shape[1]
    out = x.new_empty(rows, outs)
    kernel("quire_linear", "ipllpllpplpi")(
        CODES[x.dtype],
        x.data_ptr(),
        stride,
        rows,
        weight.data.data_ptr(),
        outs,
        weight.words,
        None if bias is None else bias.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        weight.rows // outs,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


linear_cpu.pack, linear_cpu.rows = Panels.of, Panels.pick  # type: ignore[attr-defined]


@grouped_linear.implementation("cpu", supports=on_cpu)
def grouped_linear_cpu(x: Tensor, weight: Tensor | Panels, bias: Tensor | None, offsets: Tensor) -> Tensor:
    if isinstance(weight, Panels):
        return _multiply(x, weight, bias, weight.rows // (len(offsets) - 1), offsets)
    rows = len(x)
    experts = len(weight)
    out_features, in_features = weight.shape[1:]
    check_width(x.shape[1], in_features)
    if weight.stride(2) != 1 or weight.dtype is not x.dtype:
        return grouped_linear.reference(x, weight, bias, offsets)  # type: ignore[no-any-return]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(rows, out_features)
    kernel("quire_grouped_linear", "iplpllpplllpi")(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        weight.stride(1),
        None if bias is None else bias.data_ptr(),
        offsets.data_ptr(),
        experts,
        in_features,
        out_features,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _pack_experts(weight: Tensor) -> Tensor | Panels:
    """weight: [experts, out, in]"""
    if weight.shape[1] % PANEL:
        return weight
    return Panels.of(weight.flatten(0, 1))


grouped_linear_cpu.pack = _pack_experts  # type: ignore[attr-defined]


@linear_by_head.implementation("cpu", supports=on_cpu)
def linear_by_head_cpu(x: Tensor, weight: Tensor) -> Tensor:
    (tokens, heads, in_features), out_features = x.shape, weight.shape[1]
    check_width(in_features, weight.shape[2])
    if weight.stride(2) != 1 or weight.dtype is not x.dtype:
        return linear_by_head.reference(x, weight)  # type: ignore[no-any-return]
    if x.stride(2) != 1:
        x = x.contiguous()
    out = x.new_empty(tokens, heads, out_features)
    kernel("quire_linear_by_head", "iplllplllllpi")(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        tokens,
        weight.data_ptr(),
        weight.stride(0),
        weight.stride(1),
        heads,
        in_features,
        out_features,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@combine_experts.implementation("cpu", supports=on_cpu)
def combine_experts_cpu(out: Tensor, order: Tensor, weights: Tensor | None) -> Tensor:
    tokens, top_k = (len(out), 1) if weights is None else weights.shape
    out = out.contiguous()
    order = order.contiguous()
    weights = None if weights is None else weights.contiguous()
    combined = out.new_empty(tokens, out.shape[1])
    kernel("quire_combine_experts", "ippplllpi")(
        CODES[out.dtype],
        out.data_ptr(),
        order.data_ptr(),
        None if weights is None else weights.data_ptr(),
        tokens,
        top_k,
        out.shape[1],
        combined.data_ptr(),
        torch.get_num_threads(),
    )
    return combined
