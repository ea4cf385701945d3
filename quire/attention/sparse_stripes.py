"""Sparse attention over stripes: each rank keeps the latents and the indexer's keys of every n-th token.

The selection equals that of a single rank. Each rank scores the keys of its stripe. Its best keys, as many as a token
selects, become candidates. The ranks exchange the candidates' scores, and each derives from them the lowest selected
score. A rank then attends to its selected candidates, and the partial results are merged as in all attention over
stripes (stripes.py).

A candidate is sent as one integer. A higher score makes it larger; with equal scores, so does an earlier position:

    bits 63 ... 32  the score, as a signed integer of the same order
    bits 31 ... 0   2**31 - 1 - position
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, Selection, StepLayout
from quire.attention.sparse import SelectingAttention
from quire.attention.stripes import Part, StripedAttention, StripedPlan
from quire.ops import Kernels
from quire.parallel.mesh import Communicator

_ABSENT = torch.iinfo(torch.int64).min  # less than every candidate
_LAST = torch.iinfo(torch.int32).max
_MOST_CANDIDATES = 1 << 23  # in memory at a time


@dataclass(kw_only=True)
class StripedSparsePlan(StripedPlan):
    """candidates: the candidates for the tokens that all ranks compute, in the order of the ranks of the group cp."""

    candidates: Selection


class StripedSparseAttention(StripedAttention, SelectingAttention):
    """Layers call `select_from`, or reuse the selection that the previous layer left in the plan, and then `attend`."""

    def __init__(
        self,
        shape: AttentionShape,
        cp: Communicator,
        dcp: Communicator,
        choose: Callable[[AttentionShape], AttentionBackend],
        kernels: Kernels,
        most: int,
        indexer_dim: int,
    ) -> None:
        """most, indexer_dim: see SparseAttention. All others: see ContextAttention."""
        super().__init__(shape, cp, dcp, choose, kernels)
        self.most = most
        self.keys = type(self.inner)(replace(shape, num_heads=1, head_dim=indexer_dim, value_dim=indexer_dim))

    def inner_shape(self) -> AttentionShape:
        return replace(super().inner_shape(), by_slot=True)

    def of_role(self, role: str) -> AttentionBackend:
        return self.keys if role == "indexer" else self

    def plan(self, layout: StepLayout, previous: Any = None) -> StripedSparsePlan:
        striped = super().plan(layout)
        requests, positions = (torch.cat(parts) for parts in zip(*striped.queries, strict=True))
        is_padding = requests == len(layout.seq_lens)
        seen = ((positions - self.stripe) // self.stripes + 1).clamp(min=0).masked_fill(is_padding, 0)
        rows = requests.clamp(max=len(layout.seq_lens) - 1)
        width = min(self.most, layout.block_table.shape[1] * self.shape.block_size)
        numbers = torch.empty(len(rows), width, dtype=torch.int32, device=rows.device)
        scores = torch.empty(len(rows), width, dtype=torch.float32, device=rows.device)
        candidates = Selection(rows.int(), seen.int(), layout.block_table, numbers, scores)
        return StripedSparsePlan(
            striped.layout, striped.store, striped.shares, striped.queries, striped.parts, candidates=candidates
        )

    def select_from(self, cache: Tensor, q: Tensor, weights: Tensor, k: Tensor, plan: StripedSparsePlan) -> None:
        self.keys.store(cache, k[: plan.shares[self.cp.rank]], None, plan.store)
        self.keys.select(self._of_all_ranks(q, plan), self._of_all_ranks(weights, plan), cache, plan.candidates)
        slots, counts = self._chosen(plan.candidates)
        parts = zip(*(torch.split(x, list(plan.shares)) for x in (slots, counts)), strict=True)
        plan.parts[None] = [[self._selected(*part)] for part in parts]

    def _of_all_ranks(self, x: Tensor, plan: StripedSparsePlan) -> Tensor:
        """[own tokens, ...] -> [tokens of all ranks, ...]"""
        if self.cp.size == 1:
            return x
        count = plan.shares[self.cp.rank]
        copies = x[:count].flatten(1).repeat(self.cp.size, 1)
        gathered = self.cp.all_to_all(copies, [count] * self.cp.size, plan.shares).wait()
        return gathered.view(-1, *x.shape[1:])

    def _chosen(self, candidates: Selection) -> tuple[Tensor, Tensor]:
        """Return the slots of this rank's selected candidates, in order of position, [tokens, candidates], padded with
        slot 0, and the number of these, [tokens]."""
        tokens, width = candidates.slots.shape
        at_once = max(1, _MOST_CANDIDATES // (width * self.stripes))
        slots = torch.zeros(tokens, width + 1, dtype=torch.int32, device=candidates.slots.device)
        counts = torch.empty(tokens, dtype=torch.int32, device=slots.device)
        for start in range(0, tokens, at_once):
            part = slice(start, start + at_once)
            number = candidates.slots[part].long()
            is_there = torch.arange(width, device=slots.device) < candidates.seen[part, None]
            assert candidates.scores is not None
            own = self._comparable(candidates.scores[part], number).masked_fill(~is_there, _ABSENT)
            is_chosen = (own >= self._least(own)) & is_there
            number = number.masked_fill(~is_chosen, 0)
            size = self.shape.block_size
            blocks = candidates.block_table[candidates.rows[part, None].long(), number // size]
            place = is_chosen.cumsum(1) - 1
            slots[part].scatter_(1, place.masked_fill(~is_chosen, width), (blocks * size + number % size).int())
            counts[part] = is_chosen.sum(1)
        return slots[:, :width], counts

    def _comparable(self, scores: Tensor, number: Tensor) -> Tensor:
        """Return the integers by which candidates are compared. number: the keys' indices in this rank's stripe."""
        bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
        ordered = torch.where(bits < 0, bits ^ _LAST, bits).long()
        return (ordered << 32) + (_LAST - (number * self.stripes + self.stripe))

    def _least(self, own: Tensor) -> Tensor:
        """Return the lowest selected candidate of all ranks, [tokens, 1]. own: this rank's candidates, [tokens,
        candidates]."""
        best = own
        for group in (self.dcp, self.cp):
            if group.size > 1:
                best = group.all_gather(best, best.shape[1] * group.size)
                best = best.topk(min(self.most, best.shape[1]), dim=1).values
        return best[:, -1:]

    def _selected(self, slots: Tensor, counts: Tensor) -> Part:
        """Return the plan by which a rank's tokens attend to their selected keys in this rank's stripe."""
        token = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        unused = torch.full_like(token[:-1], -1, dtype=torch.int64)  # latents are stored by another plan
        # A token without keys on this rank attends to the null block, and its result is discarded.
        inner = StepLayout(token, counts.clamp(min=1), unused, slots, tokens_per_request=1)
        return Part(self.inner.plan(inner), slice(None), slice(None), counts == 0, None)
