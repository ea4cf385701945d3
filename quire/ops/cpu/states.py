"""Recurrent layers in C++."""

import ctypes

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.reference import states as reference
from quire.ops.reference.states import Pages, StatePlan

_MOST_TAPS = 16  # in a convolution, as in states.cpp


@reference.causal_conv.implementation("cpu", supports=on_cpu)
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, pages: Pages, plan: StatePlan, silu: bool = True
) -> Tensor:
    width, channels = weight.shape
    if width > _MOST_TAPS:
        return reference.causal_conv.reference(x, weight, bias, pages, plan, silu)  # type: ignore[no-any-return]
    out = x.new_empty(len(x), channels)
    kernel("quire_causal_conv", "piipllplpplp")(
        ctypes.addressof(plan.step),
        silu,
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        channels,
        weight.data_ptr(),
        width,
        None if bias is None else bias.data_ptr(),
        pages.inputs.data_ptr(),
        pages.inputs.stride(0),
        out.data_ptr(),
    )
    return out


@reference.time_steps.implementation("cpu", supports=on_cpu)
def time_steps(x: Tensor, bias: Tensor, rate: Tensor, least: float, most: float) -> tuple[Tensor, Tensor]:
    steps, decay = (torch.empty(x.shape, dtype=torch.float32) for _ in range(2))
    kernel("quire_time_steps", "iplllppffppi")(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        bias.data_ptr(),
        rate.data_ptr(),
        least,
        most,
        steps.data_ptr(),
        decay.data_ptr(),
        torch.get_num_threads(),
    )
    return steps, decay


@reference.bounded_decays.implementation("cpu", supports=on_cpu)
def bounded_decays(x: Tensor, bias: Tensor, rate: Tensor, bound: float) -> Tensor:
    decay = torch.empty(x.shape, dtype=torch.float32)
    kernel("quire_bounded_decays", "iplllppfpi")(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        bias.data_ptr(),
        rate.data_ptr(),
        bound,
        decay.data_ptr(),
        torch.get_num_threads(),
    )
    return decay


@reference.scan.implementation("cpu", supports=on_cpu)
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: Tensor,
    skip: Tensor | None,
    pages: Pages,
    plan: StatePlan,
    rule: str,
) -> Tensor:
    tokens, heads, value_dim = v.shape
    out = v.new_empty(tokens, heads, value_dim)
    kernel("quire_scan", "piiilllllpllpllplpplpplppp")(
        ctypes.addressof(plan.step),
        CODES[v.dtype],
        scale.dtype is torch.float32,
        reference.RULES.index(rule),
        heads,
        *k.shape[1:],
        value_dim,
        decay.shape[1] // heads,
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        k.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.data_ptr(),
        v.stride(0),
        decay.data_ptr(),
        scale.data_ptr(),
        scale.stride(0),
        None if skip is None else skip.data_ptr(),
        pages.state.data_ptr(),
        pages.state.stride(0),
        pages.behind.data_ptr(),
        pages.number.data_ptr(),
        out.data_ptr(),
    )
    return out


@reference.selective_scan.implementation("cpu", supports=on_cpu)
def selective_scan(
    q: Tensor, k: Tensor, v: Tensor, steps: Tensor, rate: Tensor, skip: Tensor, pages: Pages, plan: StatePlan
) -> Tensor:
    out = v.new_empty(v.shape)
    kernel("quire_selective_scan", "pillplplplpppplppp")(
        ctypes.addressof(plan.step),
        CODES[v.dtype],
        *rate.shape,
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        steps.data_ptr(),
        rate.data_ptr(),
        skip.data_ptr(),
        pages.state.data_ptr(),
        pages.state.stride(0),
        pages.behind.data_ptr(),
        pages.number.data_ptr(),
        out.data_ptr(),
    )
    return out


@reference.gated_norm.implementation("cpu", supports=on_cpu)
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, size: int, gate_first: bool, activation: str
) -> Tensor:
    rows, n = x.shape
    out = x.new_empty(rows, n)
    kernel("quire_gated_norm", "iplplllpfliipi")(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        rows,
        n,
        None if weight is None else weight.data_ptr(),
        eps,
        n if weight is None else size,
        gate_first,
        activation == "silu",
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@reference.removal_keys.implementation("cpu", supports=on_cpu)
def removal_keys(
    r: Tensor, k: Tensor, read: Tensor, decay: Tensor, rate: Tensor, rate_scale: Tensor, bonus: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r, k, read, decay, rate = (x.contiguous() for x in (r, k, read, decay, rate))
    tokens, heads, dim = read.shape
    keys = torch.empty_like(k)
    decays, scale, products = (k.new_empty(tokens, size * heads * dim, dtype=torch.float32) for size in (1, 2, 1))
    kernel("quire_removal_keys", "illlpppppppppppi")(
        CODES[k.dtype],
        tokens,
        heads,
        dim,
        r.data_ptr(),
        k.data_ptr(),
        read.data_ptr(),
        decay.data_ptr(),
        rate.data_ptr(),
        rate_scale.data_ptr(),
        bonus.data_ptr(),
        keys.data_ptr(),
        decays.data_ptr(),
        scale.data_ptr(),
        products.data_ptr(),
        torch.get_num_threads(),
    )
    return keys, decays, scale, products


@reference.add_bonus.implementation("cpu", supports=on_cpu)
def add_bonus(y: Tensor, weight: Tensor, bias: Tensor, bonus: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    y = y.contiguous()
    v = v.contiguous()
    gate = gate.contiguous()
    out, (rows, dim) = torch.empty_like(v), y.shape
    kernel("quire_add_bonus", "illlpppppppi")(
        CODES[v.dtype],
        rows,
        v.shape[1] // dim,
        dim,
        y.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        bonus.data_ptr(),
        v.data_ptr(),
        gate.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
