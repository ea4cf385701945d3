"""Attention with a separate length for each KV head, for compressed requests, whose KV heads keep different tokens.

A block of the pool consists of slices, one for each layer and KV head, and each slice has the layout of a block of a
model with one layer and one KV head. So the whole pool is also a cache of such a model, with many small blocks:

    block 3 of a model with 2 layers of 2 KV heads     | layer 0, head 0 | layer 0, head 1 | layer 1, head 0 | ... |
    slices                                                     12                13                14

In this view, each KV head of a request becomes a separate request with its own length and table of slices. So the
kernels of every backend can compute attention by head (KV-Compress, arXiv:2410.00161). Requests that are not compressed
use the slices of their blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, Preparation, PreparingBackend, Scores, StepLayout

# (queries [window, heads, head_dim], keys [tokens, kv_heads, head_dim], number of missing first keys [kv_heads], scale,
# soft cap) -> scores [kv_heads, tokens]
ScoreKeys = Callable[[Tensor, Tensor, Tensor, float, float | None], Tensor]


@dataclass
class EndingText:
    """A prompt, or a text so far, that ends in a step and is compressed after it.

    row: the row of its request. num_tokens: the tokens of the longest head; a head lacks the first `missing` of these,
    [layers, kv_heads]. queries: the last queries, as a range of the step's tokens. blocks: the request's blocks,
    [blocks]. slices: the heads' slices, [layers, kv_heads, blocks], including missing ones. scores: the scores of the
    keys, [kv_heads, num_tokens] for each layer computed so far.
    """

    row: int
    num_tokens: int
    num_kept_blocks: int
    queries: slice
    blocks: Tensor
    slices: Tensor
    missing: Tensor
    score_keys: ScoreKeys
    scores: list[Tensor] = field(default_factory=list)


@dataclass
class HeadLayout:
    """The data of a step with compressed prompts. Tables and lengths are ordered by KV head, then by request. They are
    None if no request of the step has been compressed before.

    tables: slices, [layers, kv_heads * requests, most slices], int32. lengths: [layers, kv_heads * requests], int32.
    """

    endings: Sequence[EndingText]
    tables: Tensor | None = None
    lengths: Tensor | None = None


@dataclass
class ByHeadPlan:
    """inner: the plan of the whole step. heads: each layer's plan by head; empty if no request is compressed."""

    inner: Any
    heads: list[Any]
    endings: Sequence[EndingText] = ()


class AttentionByHead(AttentionBackend):
    """Adds lengths by head to the backend `inner`, which stores everything and computes steps without compressed
    requests."""

    slices: Tensor  # the pool as a cache of one layer and one KV head, once it is allocated

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner.shape)
        self.inner = inner
        self.name = inner.name
        self.cache_dtype = inner.cache_dtype
        self.block_shape = inner.block_shape
        self.group = inner.shape.num_heads // inner.shape.num_kv_heads
        self.heads = type(inner)(replace(inner.shape, num_heads=self.group, num_kv_heads=1))

    @classmethod
    def unsupported(cls, shape: Any) -> str | None:
        return None  # the other backend decides

    def view_at(self, memory: Tensor, start: int) -> Tensor:
        self.slices = self.heads.view(memory.view(-1, self.heads.entry_bytes()), 0)
        return super().view_at(memory, start)

    def plan(self, layout: StepLayout, previous: Any = None) -> ByHeadPlan:
        inner = self.inner.plan(layout)
        by_head = layout.by_head
        if by_head is None:
            return ByHeadPlan(inner, [])
        heads: list[Any] = []
        if by_head.tables is not None and by_head.lengths is not None:
            starts = layout.query_start_loc
            kv_heads = self.shape.num_kv_heads
            tokens = len(layout.slot_mapping)
            firsts = torch.arange(kv_heads, dtype=torch.int32, device=starts.device)[:, None] * tokens + starts[:-1]
            starts = torch.cat([firsts.flatten(), starts[-1:] + tokens * (kv_heads - 1)])
            slots = layout.slot_mapping.new_empty(tokens * kv_heads)  # unused: the plan `inner` stores the tokens
            for lengths, tables in zip(by_head.lengths, by_head.tables, strict=True):
                head = StepLayout(starts, lengths, slots, tables, 0, layout.tokens_per_request)
                heads.append(self.heads.plan(head))
        return ByHeadPlan(inner, heads, by_head.endings)

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: ByHeadPlan) -> None:
        self.inner.store(cache, k, v, plan.inner)

    def attend(self, q: Tensor, cache: Tensor, plan: ByHeadPlan, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        first = self.slices.storage_offset()
        kv_heads = self.shape.num_kv_heads
        layer = (cache.storage_offset() - first) * cache.element_size() // self.entry_bytes()
        for text in plan.endings:
            keys = self.heads.read(self.slices, text.slices[layer].flatten(), 0)
            keys = keys.view(kv_heads, -1, keys.shape[-1])[:, : text.num_tokens].transpose(0, 1)
            how = text.missing[layer], scores["scale"], scores.get("soft_cap")
            text.scores.append(text.score_keys(q[text.queries], keys, *how))
        if not plan.heads:
            return self.inner.attend(q, cache, plan.inner, **scores)
        tokens, heads, _ = q.shape
        by_head = q.reshape(tokens, kv_heads, self.group, -1).transpose(0, 1).flatten(0, 1)
        out, lse = self.heads.attend(by_head, self.slices, plan.heads[layer], **scores)
        out = out.view(kv_heads, tokens, self.group, -1).transpose(0, 1).reshape(tokens, heads, -1)
        return out, lse.view(kv_heads, tokens, self.group).transpose(0, 1).reshape(tokens, heads)

    def pick(self, sources: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values. sources: slices, [slices]. tokens: indices into the concatenated tokens of these
        slices, [tokens]."""
        keys, values = (self.heads.read(self.slices, sources, plane)[tokens] for plane in (0, 1))
        return keys, values

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write keys and values into slots of slices, [tokens]; -1 skips a token."""
        bounds = torch.arange(2, dtype=torch.int32, device=slots.device) * len(slots)
        table = bounds[None, :1]
        self.heads.store(self.slices, keys, values, self.heads.plan(StepLayout(bounds, bounds[1:], slots, table)))


class PreparingByHead(AttentionByHead, PreparingBackend):
    """Like AttentionByHead, for a backend that norms, rotates and stores in one pass."""

    inner: PreparingBackend

    def __init__(self, inner: PreparingBackend) -> None:
        super().__init__(inner)
        self.kernels = inner.kernels

    def prepare(self, cache: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: ByHeadPlan, prep: Preparation) -> None:
        self.inner.prepare(cache, q, k, v, plan.inner, prep)


def by_head(inner: AttentionBackend) -> AttentionByHead:
    return PreparingByHead(inner) if isinstance(inner, PreparingBackend) else AttentionByHead(inner)
