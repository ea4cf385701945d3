"""Exchanges tokens with a fixed capacity: each rank has room for the largest step of all ranks, see StepCapacity.

Sizes depend on the capacity alone, and counts stay on the device. So the host waits for nothing, and CUDA graphs can
contain the exchange. A step without a fixed capacity is exchanged by counts, as `Exchanged` does.
"""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.dispatch import Exchanged, OwnTokens, Routed, Sent
from quire.parallel.experts import ExpertRanks


class FixedDispatch(Exchanged):
    """The base of all dispatches with a fixed capacity."""

    def __init__(self, builder: Builder, ranks: ExpertRanks, num_experts: int) -> None:
        super().__init__(builder, ranks, num_experts)
        assert ranks.capacity is not None
        self.capacity = ranks.capacity

    def send(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, num_tokens: int, adapters: Tensor | None = None
    ) -> Sent:
        if not self.capacity.tokens:
            return super().send(x, experts, weights, num_tokens, adapters)
        room = -(-self.capacity.tokens // self.tensor_group.size)  # for the own tokens of each rank
        if weights is None:
            weights = torch.ones(experts.shape, device=x.device)
        return self.send_fixed(x, self.slots.of(experts), weights, num_tokens, room, adapters)

    @abstractmethod
    def send_fixed(
        self, x: Tensor, slots: Tensor, weights: Tensor, num_tokens: int, room: int, adapters: Tensor | None
    ) -> Sent:
        """Start to send own tokens. x: [own tokens, hidden]; slots, weights: [own tokens, top_k]. room: the largest
        number of own tokens on any rank. adapters: see `send`; only `Gathered` supports them."""


class Gathered(FixedDispatch):
    """Every rank receives all tokens, and applies its own experts to them. The results are added up on the way back.

    These are an all-gather and a reduce-scatter, which every group of ranks has. They send a token to all ranks, not
    only to those with its experts. The last bits of a result depend on the placement of experts.
    """

    def send_fixed(
        self, x: Tensor, slots: Tensor, weights: Tensor, num_tokens: int, room: int, adapters: Tensor | None
    ) -> Sent:
        return _Gathering(self, x, slots, weights, num_tokens, room, adapters)


class _Gathering(Sent):
    """Tokens on their way to all ranks. A token is one row: its elements, its slots as integers of the same width
    [top_k], its adapter slot if experts have adapters, and the float32 weights of the slots, as elements of the same
    type. Rows without a token have the slots -1."""

    def __init__(
        self,
        dispatch: Gathered,
        x: Tensor,
        slots: Tensor,
        weights: Tensor,
        num_tokens: int,
        room: int,
        adapters: Tensor | None,
    ) -> None:
        self.dispatch = dispatch
        self.num_tokens = num_tokens
        self.num_own = len(x)
        self.hidden = x.shape[1]
        self.top_k = slots.shape[1]
        self.integers = torch.int16 if x.itemsize == 2 else torch.int32
        self.has_adapters = adapters is not None
        numbers = slots if adapters is None else torch.cat([slots, adapters[:, None]], dim=1)
        self.end = self.hidden + numbers.shape[1]
        columns = x, numbers.to(self.integers).view(x.dtype), weights.contiguous().view(x.dtype)
        rows = torch.cat(columns, dim=1)
        if len(x) < room:
            padding = rows.new_zeros(room - len(x), rows.shape[1])
            padding[:, self.hidden : self.end].view(self.integers).fill_(-1)
            rows = torch.cat([rows, padding])
        self.exchange = dispatch.group.gather_equal(rows)

    def receive(self) -> Routed:
        dispatch = self.dispatch
        rows = self.exchange.wait()  # [ranks * room, columns]
        x = rows[:, : self.hidden]
        numbers = rows[:, self.hidden : self.end].view(self.integers).long()
        weights = rows[:, self.end :]
        here = numbers[:, : self.top_k] - dispatch.first
        elsewhere = (here < 0) | (here >= dispatch.count)
        here = here.masked_fill(elsewhere, dispatch.count)
        weights = weights.contiguous().view(torch.float32).masked_fill(elsewhere, 0)
        self.own = OwnTokens(dispatch.kernels, x.contiguous(), here, weights, dispatch.bounds)
        routed = self.own.receive()
        return replace(routed, adapters=numbers[:, self.top_k]) if self.has_adapters else routed

    def collect(self, out: Tensor) -> Tensor:
        dispatch = self.dispatch
        summed = dispatch.group.reduce_scatter(self.own.collect(out))
        return dispatch.summand(summed[: self.num_own], self.num_tokens)
