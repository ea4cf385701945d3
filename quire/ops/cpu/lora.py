"""Low-rank adapters in C++ (lora.cpp)."""

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.cpu.linear import check_width
from quire.ops.reference.lora import add_lora


@add_lora.implementation("cpu", supports=on_cpu)
def add_lora_cpu(out: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, ranks: Tensor, bounds: Tensor) -> Tensor:
    tokens, inputs = x.shape
    _, parts, rank, width = a.shape
    check_width(inputs, width)
    x_stride, x_last = x.stride()
    out_stride, out_last = out.stride()
    if x_last != 1 or out_last != 1 or out.dtype is not x.dtype:
        return add_lora.reference(out, x, a, b, slots, ranks, bounds)  # type: ignore[no-any-return]
    kernel("quire_add_lora", "iplplpppppllllli")(
        CODES[x.dtype],
        out.data_ptr(),
        out_stride,
        x.data_ptr(),
        x_stride,
        a.data_ptr(),
        b.data_ptr(),
        slots.data_ptr(),
        ranks.data_ptr(),
        bounds.data_ptr(),
        tokens,
        parts,
        rank,
        inputs,
        b.shape[2],
        torch.get_num_threads(),
    )
    return out
