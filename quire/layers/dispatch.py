"""Sends a layer's tokens to the ranks that have their experts, and collects the results.

The experts of a layer are on every rank, or they are distributed across the ranks (expert parallelism). A layer with
experts runs these steps:

    route                each rank chooses experts for its tokens
    send, receive        each token goes to the ranks that have its experts
    compute              each rank computes its experts for all rows that it received
    collect              the results are sent back, and a token's results are added up with their weights
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.ops import Kernels
from quire.ops.memory import upload
from quire.parallel.experts import ExpertRanks
from quire.parallel.mesh import Exchange


@dataclass
class Routed:
    """Rows for the experts of this rank, sorted by expert.

    rows: [rows, hidden]. offsets: [experts + 1], int64: expert e has the rows offsets[e] : offsets[e + 1]. Rows after
    the last offset belong to no expert. origins: returns, for each row (and possibly for additional ones), the token
    that it copies, and the index of its expert on this rank. adapters: the shared adapter slot of each token that was
    received from a rank; None if the tokens are those of the step.
    """

    rows: Tensor
    offsets: Tensor
    origins: Callable[[], tuple[Tensor, Tensor]]
    adapters: Tensor | None = None


class Sent(ABC):
    """Tokens that are being sent to their experts."""

    @abstractmethod
    def receive(self) -> Routed:
        """The rows for the experts of this rank."""

    @abstractmethod
    def collect(self, out: Tensor) -> Tensor:
        """Return this rank's summand of the weighted sums of the experts' results, [tokens, hidden], for all tokens of
        the step. The result is the sum over the tensor group's ranks. out: [rows, hidden], the results for the received
        rows."""


class Dispatch(ABC):
    """The dispatch of one layer.

    local: this rank's experts, by their indices in the checkpoint. exchanges: whether it receives other ranks' tokens.
    """

    local: list[int]
    exchanges: bool = False

    def own(self, x: Tensor) -> Tensor:
        """Return the tokens of the step, x, for which this rank chooses experts: [own tokens, hidden]."""
        return x

    @abstractmethod
    def send(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, num_tokens: int, adapters: Tensor | None = None
    ) -> Sent:
        """Start to send own tokens. x: [own tokens, hidden]; experts: [own tokens, top_k], int64; weights: the experts'
        weights, float32 [own tokens, top_k]; None if each token has one expert, with the weight 1. num_tokens: the
        number of tokens of the step. adapters: the shared adapter slots of the own tokens, if experts on other ranks
        have adapters."""


class Everywhere(Dispatch):
    """Every rank of the tensor group has a share of all experts, and computes it for all tokens."""

    def __init__(self, builder: Builder, num_experts: int) -> None:
        self.kernels = builder.kernels
        self.local = list(range(num_experts))
        self.bounds = torch.arange(num_experts + 1, device=builder.device)

    def send(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, num_tokens: int, adapters: Tensor | None = None
    ) -> Sent:
        return SortedTokens(self.kernels, x, experts, weights, self.bounds)


class SortedTokens(Sent):
    """All tokens of the step, sorted by expert."""

    def __init__(self, kernels: Kernels, x: Tensor, experts: Tensor, weights: Tensor | None, bounds: Tensor) -> None:
        """bounds: 0, 1, ... number of experts."""
        self.kernels = kernels
        self.weights = weights
        self.experts = experts
        self.rows, self.offsets, self.order = kernels.sort_by_expert(x, experts, bounds)

    def _origins(self) -> tuple[Tensor, Tensor]:
        return self.order // self.experts.shape[1], self.experts.flatten()[self.order]

    def receive(self) -> Routed:
        return Routed(self.rows, self.offsets, self._origins)  # not stored: it refers to self

    def collect(self, out: Tensor) -> Tensor:
        combined: Tensor = self.kernels.combine_experts(out, self.order, self.weights)
        return combined


class Slots:
    """The placement of experts on ranks. Each rank has the same number of slots, and an expert may be in several
    slots."""

    def __init__(self, slots: list[int], num_experts: int, device: torch.device, can_change: bool = False) -> None:
        """slots: the expert in each slot of all ranks. can_change: whether `put` will be called."""
        self.num_experts = num_experts
        self.most = len(slots) - num_experts + 1  # copies of an expert, if all others have one slot
        self.table = torch.zeros(num_experts, self.most, dtype=torch.int64, device=device)  # the slots of each expert
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)  # the number of its slots
        self.is_identity = slots == list(range(num_experts)) and not can_change
        self.put(slots)

    def put(self, slots: list[int]) -> None:
        """Change the experts in the slots, in place, so that CUDA graphs use the new ones, too."""
        self.experts = slots
        places: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(slots):
            places[expert].append(slot)
        device = self.table.device
        self.table.copy_(upload(np.array([[p[i % len(p)] for i in range(self.most)] for p in places]), device))
        self.counts.copy_(upload(np.array([len(p) for p in places]), device))

    def of(self, experts: Tensor) -> Tensor:
        """Return a slot for each of the chosen experts [tokens, top_k]. Tokens rotate over an expert's copies."""
        if self.is_identity:
            return experts
        turns = torch.arange(len(experts), device=experts.device)[:, None]
        return self.table[experts, turns % self.counts[experts]]


class DealtExperts(Dispatch):
    """The experts are distributed across the ranks."""

    def __init__(self, builder: Builder, ranks: ExpertRanks, num_experts: int) -> None:
        self.kernels = builder.kernels
        self.ranks = ranks
        self.group = ranks.group
        self.device = builder.device
        self.slots = Slots(ranks.first_slots(num_experts), num_experts, builder.device, ranks.measures)
        self.count = len(self.slots.experts) // self.group.size  # slots per rank
        self.bounds = torch.arange(self.count + 1, device=builder.device)

    @property
    def first(self) -> int:
        """The first slot of this rank."""
        return self.group.rank * self.count

    @property
    def local(self) -> list[int]:  # type: ignore[override]
        return self.slots.experts[self.first : self.first + self.count]


class Replicated(DealtExperts):
    """All ranks have the same tokens, and each rank applies its own experts to them."""

    def send(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, num_tokens: int, adapters: Tensor | None = None
    ) -> Sent:
        slots = self.slots.of(experts) - self.first
        elsewhere = (slots < 0) | (slots >= self.count)
        here = slots.masked_fill(elsewhere, self.count)
        return OwnTokens(self.kernels, x, here, weights, self.bounds)


class OwnTokens(SortedTokens):
    """Tokens sorted by expert. Those of experts on other ranks (with the index after the last one) come last, and their
    results are zeros.

    On a GPU, they keep their rows. So the number of rows is known in advance, and the host need not wait for it.
    """

    def __init__(self, kernels: Kernels, x: Tensor, experts: Tensor, weights: Tensor | None, bounds: Tensor) -> None:
        super().__init__(kernels, x, experts, weights, bounds)
        self.shape = experts.shape
        if x.device.type == "cpu":
            self.rows = self.rows[: int(self.offsets[-1])]

    def collect(self, out: Tensor) -> Tensor:
        tokens, top_k = self.shape
        if len(out) < tokens * top_k:
            results = out.new_zeros(tokens * top_k, out.shape[1])
            results[: len(out)] = out
        else:
            behind = torch.arange(len(out), device=out.device) >= self.offsets[-1]
            results = out.masked_fill(behind[:, None], 0)
        return super().collect(results)


class Exchanged(DealtExperts):
    """The ranks have different tokens. Each sends its tokens to the ranks with their experts (all-to-all), and receives
    the results. A token is sent once to each rank that has some of its experts.

    Ranks of the same tensor group have the same tokens, so each routes and sends a part of them. A token's results are
    added up on its original rank, in the order of its choices, so the sum does not depend on the placement of experts.
    """

    exchanges = True

    def __init__(self, builder: Builder, ranks: ExpertRanks, num_experts: int) -> None:
        super().__init__(builder, ranks, num_experts)
        self.tensor_group = builder.tensor_group

    def own(self, x: Tensor) -> Tensor:
        start, stop = self.tensor_group.share(len(x))
        return x[start:stop]

    def summand(self, own: Tensor, num_tokens: int) -> Tensor:
        """Return this rank's summand of the results, [num_tokens, hidden]: the results of its own tokens, and zeros for
        tokens that other ranks of the tensor group have sent."""
        if len(own) == num_tokens:
            return own
        start, stop = self.tensor_group.share(num_tokens)
        result = own.new_zeros(num_tokens, own.shape[1])
        result[start:stop] = own
        return result

    def send(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, num_tokens: int, adapters: Tensor | None = None
    ) -> Sent:
        return _OnTheWay(self, x, self.slots.of(experts), weights, num_tokens, adapters)


class _OnTheWay(Sent):
    """Tokens that are being exchanged. Each is sent as one row: its elements, then its slots on the receiving rank,
    integers of the same width [top_k], with -1 for experts on other ranks, and then its adapter slot if experts have
    adapters."""

    def __init__(
        self,
        dispatch: Exchanged,
        x: Tensor,
        slots: Tensor,
        weights: Tensor | None,
        num_tokens: int,
        adapters: Tensor | None,
    ) -> None:
        """x: [tokens, hidden]; slots, weights: [tokens, top_k]; adapters: [tokens]"""
        self.dispatch = dispatch
        self.weights = weights
        self.num_tokens = num_tokens
        self.top_k = slots.shape[1]
        self.hidden = x.shape[1]
        self.integers = torch.int16 if x.itemsize == 2 else torch.int32
        group = dispatch.group
        size = dispatch.group.size
        targets = slots // dispatch.count  # [tokens, top_k]: ranks
        is_sent = torch.zeros(len(x), size, dtype=torch.bool, device=x.device).scatter_(1, targets, True)
        to, token = is_sent.T.nonzero(as_tuple=True)  # sorted by rank, then by token
        to_rank = to[:, None]
        of_token = targets[token]
        there = torch.where(of_token == to_rank, slots[token] - to_rank * dispatch.count, -1)
        columns = [x[token], there.to(self.integers).view(x.dtype)]
        self.has_adapters = adapters is not None
        if adapters is not None:
            columns.append(adapters[token, None].to(self.integers).view(x.dtype))
        rows = torch.cat(columns, dim=1)
        # [ranks, 2]: numbers of rows sent to each rank, and of results received from it. They are sent from host to
        # host, so they do not wait for the tokens of the other half.
        counts = torch.stack([is_sent.sum(0), targets.flatten().bincount(minlength=size)], dim=1).cpu()
        self.sent = counts.tolist()
        self.received: list[list[int]] = group.all_to_all(counts, [1] * size, [1] * size).wait().tolist()
        self.order = targets.flatten().sort(stable=True).indices  # of the received results
        self.exchange: Exchange = group.all_to_all(rows, [n for n, _ in self.sent], [n for n, _ in self.received])

    def receive(self) -> Routed:
        self.dispatch.ranks.turns.pass_on()
        rows = self.exchange.wait()
        x = rows[:, : self.hidden]
        integers = rows[:, self.hidden :].view(self.integers).long()
        slots = integers[:, : self.top_k]
        adapters = integers[:, self.top_k] if self.has_adapters else None
        self.place = (slots.flatten() >= 0).nonzero()[:, 0]  # of each result, in return order
        experts, self.sorting = slots.flatten()[self.place].sort(stable=True)
        row = self.place[self.sorting] // self.top_k
        offsets = torch.searchsorted(experts, self.dispatch.bounds)
        return Routed(x[row], offsets, lambda: (row, experts), adapters)

    def collect(self, out: Tensor) -> Tensor:
        dispatch = self.dispatch
        results = torch.empty_like(out)
        results[self.sorting] = out
        counts = [n for _, n in self.received], [n for _, n in self.sent]
        exchange = dispatch.group.all_to_all(results, *counts)
        dispatch.ranks.turns.pass_on()
        combined = dispatch.kernels.combine_experts(exchange.wait(), self.order, self.weights)
        return dispatch.summand(combined, self.num_tokens)
