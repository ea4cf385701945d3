"""Attention of whole sequences in C++."""

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.reference.encoder_attention import encoder_attention


@encoder_attention.implementation("cpu", supports=on_cpu)
def encoder_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, reach: int | None, bias: Tensor | None = None
) -> Tensor:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    _, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kernel("quire_encoder_attention", "ipllpllpllpiiiifipipi")(
        CODES[q.dtype],
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        k.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.data_ptr(),
        v.stride(0),
        v.stride(1),
        starts.data_ptr(),
        len(starts) - 1,
        heads,
        k.shape[1],
        dim,
        scale,
        -1 if reach is None else reach,
        None if bias is None else bias.data_ptr(),
        0 if bias is None else bias.shape[1] // 2,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
