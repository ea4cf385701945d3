"""Sparse attention (DeepSeek-V3.2, arXiv:2512.02556): a token attends only to the latents that an indexer selects.

The inner backend receives every token as a request with one query and the selected keys: its block table lists their
slots. So backends need no second kind of attention, only tables of slots (AttentionShape.by_slot). The indexer stores a
separate key for each token, as a second entry of the layer in addition to the latents.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, Scores, Selection, StepLayout


@dataclass
class SparsePlan:
    """inner: the inner backend's plan, in which every token is a request with the block table selection.slots."""

    inner: Any
    selection: Selection


class SelectingAttention(AttentionBackend):
    """Attention to selected keys. The indexer's keys are the entries of role "indexer"."""

    @abstractmethod
    def select_from(self, cache: Tensor, q: Tensor, weights: Tensor, k: Tensor, plan: Any) -> None:
        """Store the step's indexer keys, k: [tokens, 1, dim], in the layer's indexer entry, then select keys for the
        step's tokens. q, weights: see AttentionBackend.select."""


class SparseAttention(SelectingAttention):
    """Layers call `select_from`, or reuse the selection that the previous layer left in the plan, and then `attend`."""

    def __init__(
        self, shape: AttentionShape, most: int, indexer_dim: int, choose: Callable[[AttentionShape], AttentionBackend]
    ) -> None:
        """most: the number of keys that a token selects. indexer_dim: the size of the indexer's keys. choose: creates
        the backend of the latents, and a second one for the indexer's keys."""
        super().__init__(shape)
        self.most, self.latents = most, choose(replace(shape, by_slot=True))
        self.keys = type(self.latents)(replace(shape, num_heads=1, head_dim=indexer_dim, value_dim=indexer_dim))
        self.name = self.latents.name
        self.capturable = self.latents.capturable
        self.cache_dtype = self.latents.cache_dtype
        self.block_shape = self.latents.block_shape

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        return None

    def of_role(self, role: str) -> AttentionBackend:
        return self.keys if role == "indexer" else self

    def plan(self, layout: StepLayout, previous: SparsePlan | None = None) -> SparsePlan:
        device = layout.slot_mapping.device
        tokens = len(layout.slot_mapping)
        starts = layout.query_start_loc
        lengths = layout.seq_lens
        token = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        rows = torch.searchsorted(starts[1:].contiguous(), token[:-1], right=True, out_int32=True)
        rows = rows.clamp(max=len(lengths) - 1)  # padded tokens belong to no request
        seen = (lengths[rows] - starts[1:][rows] + token[1:]).where(token[:-1] < starts[-1], 1)
        if previous is None:
            slots = torch.empty(tokens, self.most, dtype=torch.int32, device=device)
            selection = Selection(rows, seen, layout.block_table, slots)
        else:
            selection = previous.selection
            selection.change(rows, seen, layout.block_table)
        inner = StepLayout(token, seen.clamp(max=self.most), layout.slot_mapping, selection.slots, tokens_per_request=1)
        return SparsePlan(self.latents.plan(inner, previous and previous.inner), selection)

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: SparsePlan) -> None:
        self.latents.store(cache, k, v, plan.inner)

    def select_from(self, cache: Tensor, q: Tensor, weights: Tensor, k: Tensor, plan: SparsePlan) -> None:
        self.keys.store(cache, k, None, plan.inner)
        self.keys.select(q, weights, cache, plan.selection)

    def attend(self, q: Tensor, cache: Tensor, plan: SparsePlan, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        return self.latents.attend(q, cache, plan.inner, **scores)
