"""Attention over stripes: each rank stores the keys and values of every n-th token, and queries are sent around.

The token at position p belongs to stripe p % n. With n = 3 ranks and blocks of 2 tokens on each, a block of the
scheduler has 6 tokens, and its slots become slots of the ranks by one division:

    position            0    1    2    3    4    5    6    7
    slot of the step    0    1    2    3    4    5    6    7
    stripe : slot      0:0  1:0  2:0  0:1  1:1  2:1  0:2  1:2

A query at position p sees (p - r) // n + 1 keys of stripe r. For the query n positions later, this number is larger by
1. So queries whose positions are equal modulo n (a class) see a stripe as ordinary causal queries see a context: the
inner backend receives each class of a request as a separate request.

Stripes follow Striped Attention (arXiv:2311.09431): whatever part of a prompt a step computes, the ranks' work differs
by at most one key per query. Keys stay where they are stored, and queries are sent instead ("pass-Q", Yang et al.,
arXiv:2411.01783). The partial results are sent back and merged by their log-sum-exp. The ring follows Ring Attention
(arXiv:2310.01889): a rank attends to the queries of one rank while it receives those of the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from quire.attention.base import AttentionShape, Scores, StepLayout
from quire.attention.context import ContextAttention, Ints, packed, unpacked


@dataclass(frozen=True)
class Part:
    """How some queries attend to this rank's stripe.

    order: the queries in the order of computation, [queries], or all in their original order; queries that see no key
    come last, outside of all requests. place: the index of each query in that order. is_blind: whether a query sees no
    key. window: the size of the window in the stripe.
    """

    plan: Any
    order: Tensor | slice
    place: Tensor | slice
    is_blind: Tensor
    window: int | None


@dataclass
class StripedPlan:
    """queries: the requests and positions of the queries that each rank of the group cp computes. parts: for each
    window and rank, how the rank's queries attend to this rank's stripe."""

    layout: StepLayout
    store: Any
    shares: Sequence[int]
    queries: list[tuple[Tensor, Tensor]]
    parts: dict[int | None, list[list[Part]]] = field(default_factory=dict)


class StripedAttention(ContextAttention):
    """Divides the tokens of a context among all ranks of the groups cp and dcp.

    The ranks of a group dcp have adjacent stripes, and each computes the tokens of all of these: rank c of the group cp
    computes the tokens of stripes c * dcp to (c + 1) * dcp - 1.
    """

    how = "over stripes"

    @property
    def stripes(self) -> int:
        return self.cp.size * self.dcp.size

    @property
    def stripe(self) -> int:
        """The stripe of this rank."""
        return self.cp.rank * self.dcp.size + self.dcp.rank

    @property
    def tokens_per_block(self) -> int:
        return self.shape.block_size * self.stripes

    def inner_shape(self) -> AttentionShape:
        return replace(self.shape, num_heads=self.shape.num_heads * self.dcp.size)

    def owners(self, positions: Ints) -> Ints:
        return positions % self.stripes // self.dcp.size

    def plan(self, layout: StepLayout, previous: Any = None) -> StripedPlan:
        n = self.stripes
        slots = layout.slot_mapping
        slots = torch.where(slots % n == self.stripe, slots // n, -1)
        ends = layout.query_start_loc[1:]
        tokens = torch.arange(len(slots), device=slots.device, dtype=torch.int32)
        requests = torch.searchsorted(ends, tokens, right=True)  # len(ends) for padding
        known = requests.clamp(max=len(ends) - 1)
        positions = layout.seq_lens[known] - ends[known] + tokens
        shares = layout.shares or [len(slots)]
        queries = [(requests, positions)]
        if layout.shares:
            order = (positions % n // self.dcp.size).sort(stable=True).indices
            by_rank = torch.split(order, list(layout.shares))
            queries = [(requests[index], positions[index]) for index in by_rank]
            slots = slots[by_rank[self.cp.rank]]
        only_slots = StepLayout(layout.query_start_loc[:1], layout.seq_lens[:0], slots, layout.block_table[:0])
        return StripedPlan(layout, self.inner.plan(only_slots), shares, queries)

    def _parts(self, layout: StepLayout, requests: Tensor, positions: Tensor, window: int | None) -> list[Part]:
        """Return how queries attend to this rank's stripe. A window of w tokens has w // n tokens of the stripe, or one
        more; the number is the same for all queries of a class."""
        n, last = self.stripes, (positions - self.stripe) // self.stripes  # the last key in the stripe, or -1
        sees = (last >= 0) & (requests < len(layout.seq_lens))
        if window is None:
            return [self._part(layout, requests, positions, last + 1, sees, None)]
        widths = last - (positions - window - self.stripe) // n
        return [
            self._part(layout, requests, positions, last + 1, sees & (widths == width), width)
            for width in sorted({window // n, -(-window // n)} - {0})
        ]

    def _part(
        self, layout: StepLayout, requests: Tensor, positions: Tensor, keys: Tensor, sees: Tensor, window: int | None
    ) -> Part:
        """keys: the number of keys of the stripe up to each query's position. sees: whether the part contains the
        query."""
        numbers = torch.arange(len(requests) + 1, device=requests.device)
        classes = self.dcp.size
        is_single = 0 < layout.tokens_per_request <= self.stripes  # then no two queries of a request share a class
        if is_single:
            order = sees.logical_not().int().sort(stable=True).indices
            starts = numbers.minimum(sees.sum())
            rows = requests[order].clamp(max=len(layout.seq_lens) - 1)
            lengths = keys[order] * sees[order]
        else:
            borders = torch.arange(len(layout.seq_lens) * classes + 1, device=requests.device)
            class_of = torch.where(sees, requests * classes + positions % classes, borders[-1])
            ordered, order = class_of.sort(stable=True)
            starts = torch.searchsorted(ordered, borders)
            rows = borders[:-1] // classes
            # The keys of the last query of each class. An empty class before all others has the index -1, which is the
            # padding (0).
            of_last = torch.nn.functional.pad(keys[order], (0, 1))[starts[1:] - 1]
            lengths = of_last * (starts.diff() > 0)
        inner = StepLayout(
            starts.int(),
            lengths.int(),
            torch.full_like(order, -1),
            layout.block_table.index_select(0, rows),
            tokens_per_request=int(is_single),
        )
        place = torch.empty_like(order).index_copy_(0, order, numbers[:-1])
        return Part(self.inner.plan(inner), order, place, sees.logical_not(), window)

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: StripedPlan) -> None:
        count = plan.shares[self.cp.rank]
        self.inner.store(cache, k[:count], None if v is None else v[:count], plan.store)

    def attend(self, q: Tensor, cache: Tensor, plan: StripedPlan, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        window = scores.get("window")
        count = plan.shares[self.cp.rank]
        if window not in plan.parts:
            plan.parts[window] = [self._parts(plan.layout, *queries, window) for queries in plan.queries]
        results = self._ring(self._all_heads(q[:count]), cache, plan, scores)
        if not count:
            heads = self.shape.num_heads
            return q.new_zeros(len(q), heads, self.shape.out_dim), q.new_zeros(len(q), heads, dtype=torch.float32)
        out, lse = self.merge_partials(*unpacked(self._own_heads(results)), scores.get("sinks"))
        return out, lse

    def _ring(self, q: Tensor, cache: Tensor, plan: StripedPlan, scores: Scores) -> Tensor:
        """Return the packed results for q over the stripes of each rank of the group cp, [ranks, tokens, heads, ...].
        They are in the order of arrival, by the ranks' distance."""
        cp = self.cp
        parts = plan.parts[scores.get("window")]
        coming = []
        for distance in range(1, cp.size):
            to = (cp.rank + distance) % cp.size
            source = (cp.rank - distance) % cp.size
            queries = q.new_empty(plan.shares[source], *q.shape[1:])
            coming.append((to, source, queries, cp.pass_on(q, to, queries, source)))
        width = self.shape.out_dim + torch.float32.itemsize // q.element_size()
        results = q.new_empty(cp.size, *q.shape[:2], width)
        returning = []
        self._attend(q, cache, parts[cp.rank], scores, results[0])
        for result, (to, source, queries, passing) in zip(results[1:], coming, strict=True):
            passing.wait()
            returning.append(cp.pass_on(self._attend(queries, cache, parts[source], scores), source, result, to))
        for passing in returning:
            passing.wait()
        return results

    def _attend(
        self, q: Tensor, cache: Tensor, parts: list[Part], scores: Scores, memory: Tensor | None = None
    ) -> Tensor:
        """Return the packed result over this rank's stripe. memory: where to write it, None for new memory."""
        found = []
        for part in parts:
            how: Scores = {**scores, "window": part.window, "sinks": None}
            out, lse = self.inner.attend(q[part.order], cache, part.plan, **how)
            found.append((out[part.place], lse[part.place].masked_fill(part.is_blind[:, None], float("-inf"))))
        if len(found) == 1:
            return packed(*found[0], memory)
        outs, lses = zip(*found, strict=True)
        out, lse = self.merge_partials(torch.stack(outs), torch.stack(lses))
        return packed(out, lse, memory)

    def _all_heads(self, q: Tensor) -> Tensor:
        """Return the queries of the same tokens in the heads of all ranks of the group dcp."""
        if self.dcp.size == 1:
            return q
        tokens = len(q)
        heads = self.inner.shape.num_heads
        dim = q.shape[2]
        if not tokens:
            return q.new_empty(0, heads, dim)
        return self.dcp.all_gather(q.flatten(1), heads * dim).view(tokens, heads, dim)

    def _own_heads(self, results: Tensor) -> Tensor:
        """Return the results for this rank's heads over all stripes. results: for all heads, over the stripes of the
        ranks with the same rank in their group dcp."""
        ranks = self.dcp.size
        tokens = results.shape[1]
        if ranks == 1:
            return results
        both = results[0] if len(results) == 1 else packed(*self.merge_partials(*unpacked(results)))
        by_owner = both.view(tokens, ranks, -1, both.shape[-1]).transpose(0, 1).flatten(0, 1)
        rows = [tokens] * ranks
        return self.dcp.all_to_all(by_owner, rows, rows).wait().view(ranks, tokens, *by_owner.shape[1:])
