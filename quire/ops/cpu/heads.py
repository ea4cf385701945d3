"""Operations on the vectors of heads before attention, in C++ (heads.cpp)."""

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.reference import elementwise as reference


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


@reference.join.implementation("cpu", supports=on_cpu)
def join(first: Tensor, second: Tensor) -> Tensor:
    first = _dense(first)
    second = _dense(second)
    tokens, heads, dim = first.shape
    out = first.new_empty(tokens, heads, dim + second.shape[2])
    size = first.itemsize
    kernel("quire_join", "lllplllplllpi")(
        tokens,
        heads,
        size,
        first.data_ptr(),
        first.stride(0),
        first.stride(1),
        dim,
        second.data_ptr(),
        second.stride(0),
        second.stride(1),
        second.shape[2],
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@reference.sharpen.implementation("cpu", supports=on_cpu)
def sharpen(q: Tensor, positions: Tensor, scale: float, length: int, offset: int) -> Tensor:
    q = _dense(q)
    positions = positions.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kernel("quire_sharpen", "iplllllpfllpi")(
        CODES[q.dtype],
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        *q.shape,
        positions.data_ptr(),
        scale,
        length,
        offset,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@reference.append_positions.implementation("cpu", supports=on_cpu)
def append_positions(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    positions = positions.contiguous()
    outputs: list[Tensor] = []
    for which, x in enumerate((q, k, v)):
        x, (tokens, heads, dim) = _dense(x), x.shape
        out = x.new_empty(tokens, heads, dim + 2)
        kernel("quire_append_positions", "iiplllllpppi")(
            CODES[x.dtype],
            which,
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            tokens,
            heads,
            dim,
            slopes.data_ptr(),
            positions.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        outputs.append(out)
    return tuple(outputs)
