"""Recurrent layers: a causal convolution, a scan over a state that decays, and the gates around them.

Each sequence of a step continues from a state in the cache, and stores its new state there (see StatePlan). The scan is
defined as a recurrence from token to token. Kernels compute it in the same way where results must not depend on how a
text is divided into steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quire.kv.block_pool import NULL_BLOCK_ID
from quire.ops.registry import ANYWHERE, declare, declare_invariant

if TYPE_CHECKING:
    from quire.kv.specs import StateShape


class Pages(NamedTuple):
    """The parts of a layer's pages. A page is the entry of a block and belongs to the last token in the block.

    A step may compute drafts that are rejected later, so the next step must continue from an earlier token. Therefore
    the page stores a state that is certain, and the scan's inputs for up to `drafts` tokens after it, so that these can
    be scanned again. It stores the same number of additional inputs of the convolution. Token p has row p % rows of
    `inputs` and of `behind`.
    """

    inputs: Tensor  # [blocks, width - 1 + drafts, channels]: inputs of the convolution, float32
    mlp_inputs: Tensor  # likewise for the MLP, if it reads the previous token: [blocks, ..., mlp_channels]
    state: Tensor  # [blocks, heads, key_dim, value_dim]: the state after `number` tokens, float32
    behind: Tensor  # [blocks, drafts, numbers of a token]: keys, values, decays, scales of later tokens, float32
    number: Tensor  # [blocks], int32

    @classmethod
    def of(cls, cache: Tensor, shape: StateShape, drafts: int) -> Pages:
        """cache: [blocks, numbers of a page], float32"""
        rows = shape.conv_width - 1 + drafts
        sizes = [rows * shape.channels, rows * shape.mlp_channels, shape.state_numbers, drafts * shape.token_numbers, 1]
        inputs, mlp_inputs, state, behind, number = torch.split(cache[:, : sum(sizes)], sizes, 1)
        return cls(
            inputs.view(len(cache), rows, shape.channels),
            mlp_inputs.view(len(cache), rows, shape.mlp_channels),
            state.view(len(cache), shape.heads, shape.key_dim, shape.value_dim),
            behind.view(len(cache), drafts, shape.token_numbers),
            number.view(torch.int32)[:, 0],
        )


RULES = ("plain", "delta", "removal")  # rules of the scan; in C++, the enum Rule


class _Step(ctypes.Structure):
    _fields_ = [
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("requests", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("drafts", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


class Span(NamedTuple):
    """One request's part of a step. pages: (block, number of tokens after which its state is taken)."""

    tokens: slice  # of the flat batch
    start: int  # position of the first token
    source: int  # the block with the state before the span
    pages: list[tuple[int, int]]


@dataclass
class StatePlan:
    """A step as recurrent layers need it. Request r continues from the page in the block of the token before its first
    token. A page is stored in each block that contains tokens of the step. Its state is the one after the last of these
    tokens, or after an earlier token if later ones may be rejected drafts. The first token of a step is never a draft,
    and at most `drafts` tokens are.

    starts: [requests + 1], int32, in the flat batch; lengths: [requests], int32, including the step's tokens; table:
    [requests, blocks], int32. C++ kernels read `step`, which points to these. tokens_per_request: see StepLayout.
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    block_size: int
    drafts: int
    step: _Step
    tokens_per_request: int = 0

    def set(self, starts: Tensor, lengths: Tensor, table: Tensor) -> None:
        self.starts = starts
        self.lengths = lengths
        self.table = table
        if starts.device.type == "cpu":
            self.step.starts, self.step.lengths, self.step.table = (x.data_ptr() for x in (starts, lengths, table))
            self.step.table_stride = table.stride(0)
            self.step.requests = len(lengths)
            self.step.block_size = self.block_size
            self.step.drafts = self.drafts
            self.step.threads = torch.get_num_threads()

    @classmethod
    def of(
        cls, starts: Tensor, lengths: Tensor, table: Tensor, block_size: int, drafts: int, tokens_per_request: int = 0
    ) -> StatePlan:
        plan = cls(starts, lengths, table, block_size, drafts, _Step(), tokens_per_request)
        plan.set(starts, lengths, table)
        return plan

    def spans(self) -> Iterator[Span]:
        starts = self.starts.tolist()
        lengths = self.lengths.tolist()
        table = self.table.tolist()
        for first, stop, end, blocks in zip(starts[:-1], starts[1:], lengths, table, strict=True):
            if first == stop:
                continue
            start = end - (stop - first)
            size = self.block_size
            certain = max(start + 1, end - self.drafts)
            pages = [
                (blocks[index], min((index + 1) * size, certain)) for index in range(start // size, -(-end // size))
            ]
            stored = [page for page in pages if page[0] != NULL_BLOCK_ID]  # dummy steps have no blocks
            yield Span(slice(first, stop), start, blocks[(start - 1) // size] if start else NULL_BLOCK_ID, stored)


@declare
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, pages: Pages, plan: StatePlan, silu: bool = True
) -> Tensor:
    """Return a convolution over the last `width` tokens, separately for each channel, or silu of that, in float32.

    x: [tokens, channels]; weight: [width, channels], bias: [channels], float32 -> [tokens, channels] of x's type.
    """
    out = torch.empty_like(x)
    tail = len(weight) - 1
    rows = pages.inputs.shape[1]
    for span in plan.spans():
        text = torch.cat([x.new_zeros(tail, x.shape[1]), x[span.tokens]]).float()  # from position start - tail on
        for back in range(1, min(tail, span.start) + 1):
            text[tail - back] = pages.inputs[span.source, (span.start - back) % rows]
        count = len(text) - tail
        total = torch.stack([text[k : k + count] * weight[k] for k in range(tail + 1)]).sum(0)
        total = total if bias is None else total + bias
        out[span.tokens] = (torch.nn.functional.silu(total) if silu else total).to(x.dtype)
        for block, number in span.pages:
            for position in range(max(0, number - tail), min(number + plan.drafts, span.start + count)):
                pages.inputs[block, position % rows] = text[position - span.start + tail]
    return out


@declare
def time_steps(x: Tensor, bias: Tensor, rate: Tensor, least: float, most: float) -> tuple[Tensor, Tensor]:
    """Return the time step of each token, softplus(x + bias) within least ... most, and the factor by which a state
    decays in this time, exp(-exp(rate) * steps). x: [tokens, n]; bias, rate: [n], float32 -> two [tokens, n],
    float32."""
    steps = torch.nn.functional.softplus(x.float() + bias).clamp(least, most)
    return steps, torch.exp(-rate.exp() * steps)


@declare
def bounded_decays(x: Tensor, bias: Tensor, rate: Tensor, bound: float) -> Tensor:
    """Return factors by which states decay, above exp(bound): exp(bound * sigmoid(exp(rate) * (x + bias))). x: [tokens,
    n]; bias, rate: [n], float32; bound: negative -> [tokens, n], float32."""
    return torch.exp(bound * torch.sigmoid(rate.exp() * (x.float() + bias)))


@declare
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
    """Linear attention with a state S that decays, from token to token, in float32:

        "plain":    S = decay * S;  S += k (scale * v)
        "delta":    S = decay * S;  S += k (scale * (v - S^T k))
        "removal":  S = decay * S + k v - write (S^T read)
        out = S^T q + skip * v

    The plain rule is Mamba-2 (arXiv:2405.21060) with q = C, k = B and the time step as scale. The delta rule is that of
    Gated DeltaNet (arXiv:2412.06464), and of Kimi Delta Attention (arXiv:2510.26692) if each element of a key has a
    decay of its own. The removal rule (RWKV-7, arXiv:2503.14456) also reads the state before it decays with the key
    "read", and subtracts the result along the key "write": scale has `read` and `write` of each head, [tokens, heads *
    2 * key_dim], float32. q, k: [tokens, key_heads, key_dim]; v: [tokens, heads, value_dim]; decay: [tokens, heads] or
    [tokens, heads * key_dim], float32; scale: [tokens, heads] otherwise; skip: [heads], float32 -> [tokens, heads,
    value_dim] of v's type. Head h has key head h // (heads / key_heads).
    """
    out, heads, (key_heads, key_dim) = (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        v.shape[1],
        k.shape[1:],
    )
    sizes = [key_heads * key_dim, heads * v.shape[2], decay.shape[1], scale.shape[1]]

    def advance(state: Tensor, token: Tensor) -> Tensor:
        key, value, rates, scales = torch.split(token, sizes)
        key = key.view(key_heads, key_dim, 1).repeat_interleave(heads // key_heads, 0)
        value = value.view(heads, 1, -1)
        kept = rates.view(heads, -1, 1) * state
        if rule == "removal":
            reading, writing = scales.view(heads, 2, key_dim, 1).unbind(1)
            return kept + key * value - writing * (reading * state).sum(1, keepdim=True)
        change = value - (key * kept).sum(1, keepdim=True) if rule == "delta" else value
        return kept + key * (scales.view(heads, 1, 1) * change)

    def read(state: Tensor, place: int) -> None:
        query = q[place].float().repeat_interleave(heads // key_heads, 0)
        found = (query[..., None] * state).sum(1)
        out[place] = (found if skip is None else found + skip[:, None] * v[place].float()).to(v.dtype)

    _run(torch.cat([k.flatten(1).float(), v.flatten(1).float(), decay, scale.float()], 1), advance, read, pages, plan)
    return out


@declare
def selective_scan(
    q: Tensor, k: Tensor, v: Tensor, steps: Tensor, rate: Tensor, skip: Tensor, pages: Pages, plan: StatePlan
) -> Tensor:
    """The scan of Mamba-1 (arXiv:2312.00752), where each element of a state decays separately. Its state S is one
    matrix with a column for each channel. From token to token, in float32:

        S = exp(-rate * steps) * S + k (steps * v);  out = S^T q + skip * v

    with q = C and k = B. q, k: [tokens, key_dim]; v: [tokens, channels]; steps: [tokens, channels], rate: [key_dim,
    channels], skip: [channels], float32 -> [tokens, channels] of v's type.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    sizes = [*k.shape[1:], *v.shape[1:], len(skip)]

    def advance(state: Tensor, token: Tensor) -> Tensor:
        key, value, lengths = torch.split(token, sizes)
        return torch.exp(-rate * lengths) * state + key[:, None] * (lengths * value)

    def read(state: Tensor, place: int) -> None:
        found = (q[place].float()[:, None] * state[0]).sum(0)
        out[place] = (found + skip * v[place].float()).to(v.dtype)

    _run(torch.cat([k.float(), v.float(), steps], 1), advance, read, pages, plan)
    return out


def _run(
    numbers: Tensor,
    advance: Callable[[Tensor, Tensor], Tensor],
    read: Callable[[Tensor, int], None],
    pages: Pages,
    plan: StatePlan,
) -> None:
    """Advance the states through the tokens of a step. numbers: [tokens, numbers of a token], as in Pages.behind.
    advance: returns the next state, given a state and a token's numbers. read: returns the result of a token of the
    batch."""
    for span in plan.spans():
        state = torch.zeros_like(pages.state[0])
        number = span.start
        given = [*numbers[span.tokens]]
        if span.start:
            state = pages.state[span.source]
            number = int(pages.number[span.source])
            again = [pages.behind[span.source, p % plan.drafts] for p in range(number, span.start)]
            given = [row.clone() for row in again] + given
        first = number
        for token in given:
            state = advance(state, token)
            if number >= span.start:
                read(state, span.tokens.start + number - span.start)
            number += 1
            for block, reached in span.pages:
                if reached == number:
                    pages.state[block], pages.number[block] = state, number
        for block, reached in span.pages:
            for position in range(reached, min(reached + plan.drafts, number)):
                pages.behind[block, position % plan.drafts] = given[position - first]


@declare
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, size: int, gate_first: bool, activation: str
) -> Tensor:
    """The RMS norm of each `size` elements of x, gated: norm(x * act(gate)), or norm(x) * act(gate), in float32.

    x: [tokens, n]; gate: [tokens, n]; weight: [n], or None for no norm; activation: "silu" or "sigmoid" -> [tokens, n].
    """
    wide = torch.sigmoid(gate.float()) * (gate.float() if activation == "silu" else 1.0)
    y = x.float() * wide if gate_first else x.float()
    if weight is not None:
        y = y.view(len(y), y.shape[1] // size, size)
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).flatten(1)
        y = weight * y.to(x.dtype)
    return (y if gate_first else y * wide).to(x.dtype)


@declare_invariant("cuda")
def removal_keys(
    r: Tensor, k: Tensor, read: Tensor, decay: Tensor, rate: Tensor, rate_scale: Tensor, bonus: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the inputs of RWKV-7's scan with removal from its projections, in float32.

    r, k, decay, rate: [tokens, n]; read: [tokens, heads, dim], the normed keys that are removed; rate_scale, bonus:
    [n], float32 -> the added keys, [tokens, n] of k's type; decay: [tokens, n], float32; scale: [tokens, 2 * n],
    float32; and r * key * bonus: [tokens, n], float32, which the layer sums for each head.
    """
    decay = torch.exp(-exp(-0.5) * torch.sigmoid(decay.float()))
    rate = torch.sigmoid(rate.float())
    wide = read.float()
    scale = torch.stack([wide, wide * rate.view(read.shape)], 2).flatten(1)
    k = (k * (1 + (rate - 1) * rate_scale)).to(k.dtype)
    return k, decay, scale, r.float() * k * bonus


@declare_invariant(*ANYWHERE)
def add_bonus(y: Tensor, weight: Tensor, bias: Tensor, bonus: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Return the result of RWKV-7's heads: (y * weight + bias + bonus * v) * gate, in float32.

    y: [tokens * heads, dim], normed; weight, bias: [n], float32; bonus: [tokens * heads, 1], float32; v, gate: [tokens,
    n] -> [tokens, n] of v's type.
    """
    added = (v.reshape(y.shape) * bonus).view(v.shape)
    return ((y.view(v.shape) * weight + bias + added) * gate).to(v.dtype)
