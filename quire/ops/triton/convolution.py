"""The convolutions of recurrent layers and the time steps of Mamba-2 (ops/reference/states.py defines them).

A program computes some channels of one request, which are independent of each other, for all tokens of the step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import states as reference
from quire.ops.reference.states import Pages, StatePlan
from quire.ops.triton.states import _sigmoid, of_span
from quire.ops.triton.targets import on_gpu

_CHANNELS = 128  # per program


@triton.jit
def _input(x, before, first, start, position, rows, stride, channels, channel, exists):
    """Load the inputs of a token: from this step, or from the page before it."""
    position += channel * 0  # a vector
    is_new = position >= start
    new = tl.load(x + (first + position - start) * stride + channel, mask=exists & is_new, other=0.0).to(tl.float32)
    kept = exists & (position >= 0) & (position < start)
    return tl.where(is_new, new, tl.load(before + (position % rows) * channels + channel, mask=kept, other=0.0))


@triton.jit(do_not_specialize=["block_size", "drafts"])
def _convolve(
    out,
    x,
    weight,
    bias,
    inputs,
    starts,
    lengths,
    table,
    stride,
    page,
    table_stride,
    channels,
    block_size,
    drafts,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SILU: tl.constexpr,
):
    request = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    first, start, end, certain = of_span(starts, lengths, request, drafts)
    rows = WIDTH - 1 + drafts
    table = table + request * table_stride
    source = tl.load(table + tl.maximum(start - 1, 0) // block_size, mask=start > 0, other=0).to(tl.int64)
    before = inputs + source * page
    for position in range(start, end):
        total = tl.zeros([CHANNELS], tl.float32)
        for k in tl.static_range(WIDTH):
            at = position - (WIDTH - 1) + k
            given = _input(x, before, first, start, at, rows, stride, channels, channel, exists)
            total += given * tl.load(weight + k * channels + channel, mask=exists, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=exists, other=0.0)
        if SILU:
            total = total * _sigmoid(total)
        tl.store(out + (first + position - start) * channels + channel, total, mask=exists)
    for index in range(start // block_size, tl.cdiv(end, block_size)):
        block = tl.load(table + index).to(tl.int64)
        number = tl.minimum((index + 1) * block_size, certain)
        for position in range(tl.maximum(0, number - (WIDTH - 1)), tl.minimum(number + drafts, end)):
            given = _input(x, before, first, start, position, rows, stride, channels, channel, exists)
            place = inputs + block * page + (position % rows) * channels + channel
            tl.store(place, given, mask=exists & (channel * 0 + block > 0))


@reference.causal_conv.implementation("triton", supports=on_gpu)
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, pages: Pages, plan: StatePlan, silu: bool = True
) -> Tensor:
    width, channels = weight.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    _convolve[len(plan.lengths), triton.cdiv(channels, _CHANNELS)](
        out,
        x,
        weight,
        bias,
        pages.inputs,
        plan.starts,
        plan.lengths,
        plan.table,
        x.stride(0),
        pages.inputs.stride(0),
        plan.table.stride(0),
        channels,
        plan.block_size,
        plan.drafts,
        width,
        bias is not None,
        _CHANNELS,
        silu,
    )
    return out


@triton.jit
def _time_steps(steps, decay, x, bias, rate, stride, n, least, most, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    exists = column < n
    given = tl.load(x + row * stride + column, mask=exists, other=0.0).to(tl.float32)
    given += tl.load(bias + column, mask=exists, other=0.0)
    small = tl.exp(-tl.abs(given))
    up = 1.0 + small
    # log(1 + small), accurate even where the sum loses most digits of `small`
    near = tl.where(up == 1.0, small, tl.log(up) * (small / tl.where(up == 1.0, 1.0, up - 1.0)))
    length = tl.minimum(tl.maximum(tl.maximum(given, 0.0) + near, least), most)
    speed = tl.exp(tl.load(rate + column, mask=exists, other=0.0))
    tl.store(steps + row * n + column, length, mask=exists)
    tl.store(decay + row * n + column, tl.exp(-speed * length), mask=exists)


@triton.jit
def _bounded_decays(decay, x, bias, rate, stride, n, bound, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    exists = column < n
    given = tl.load(x + row * stride + column, mask=exists, other=0.0).to(tl.float32)
    given += tl.load(bias + column, mask=exists, other=0.0)
    speed = tl.exp(tl.load(rate + column, mask=exists, other=0.0))
    tl.store(decay + row * n + column, tl.exp(bound * tl.sigmoid(speed * given)), mask=exists)


@reference.bounded_decays.implementation("triton", supports=on_gpu)
def bounded_decays(x: Tensor, bias: Tensor, rate: Tensor, bound: float) -> Tensor:
    rows, n = x.shape
    decay = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    if rows:
        _bounded_decays[rows, triton.cdiv(n, 128)](decay, x, bias, rate, x.stride(0), n, bound, 128)
    return decay


@reference.time_steps.implementation("triton", supports=on_gpu)
def time_steps(x: Tensor, bias: Tensor, rate: Tensor, least: float, most: float) -> tuple[Tensor, Tensor]:
    rows, n = x.shape
    steps, decay = (torch.empty(rows, n, dtype=torch.float32, device=x.device) for _ in range(2))
    if rows:
        _time_steps[rows, triton.cdiv(n, 128)](steps, decay, x, bias, rate, x.stride(0), n, least, most, 128)
    return steps, decay
