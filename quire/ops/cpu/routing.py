"""The choice of experts in C++ (routing.cpp)."""

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.reference import routing as reference
from quire.ops.reference.routing import Routing

_SCORINGS = ("softmax", "sigmoid", "sparse_mixer", "sqrt_softplus")  # in the order of routing.cpp


@reference.choose_experts.implementation("cpu", supports=on_cpu)
def choose_experts(logits: Tensor, correction_bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    tokens, count = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32)
    experts = torch.empty(tokens, routing.top_k, dtype=torch.int64)
    kernel("quire_choose_experts", "iplllpiliffllippi")(
        CODES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        tokens,
        count,
        None if correction_bias is None else correction_bias.data_ptr(),
        _SCORINGS.index(routing.scoring),
        routing.top_k,
        routing.normalize,
        routing.scale,
        routing.jitter,
        routing.groups,
        routing.topk_groups,
        routing.group_score == "two_best",
        weights.data_ptr(),
        experts.data_ptr(),
        torch.get_num_threads(),
    )
    return weights, experts


@reference.sort_by_expert.implementation("cpu", supports=on_cpu)
def sort_by_expert(x: Tensor, experts: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (tokens, dim), top_k, count = x.shape, experts.shape[1], len(bounds)
    x = x if x.stride(1) == 1 else x.contiguous()
    experts = experts.contiguous()
    rows = x.new_empty(tokens * top_k, dim)
    offsets = torch.empty(count, dtype=torch.int64)
    order = torch.empty(tokens * top_k, dtype=torch.int64)
    kernel("quire_sort_by_expert", "pllplllpppi")(
        x.data_ptr(),
        x.stride(0) * x.itemsize,
        dim * x.itemsize,
        experts.data_ptr(),
        tokens,
        top_k,
        count - 1,
        rows.data_ptr(),
        offsets.data_ptr(),
        order.data_ptr(),
        torch.get_num_threads(),
    )
    return rows, offsets, order
