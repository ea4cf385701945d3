"""Exchanges tokens between GPUs with the low-latency kernels of DeepEP (github.com/deepseek-ai/DeepEP). It requires the
package deep_ep and is selected with --all2all-backend deepep_low_latency.

Each expert has room for the largest step of every rank. The kernels write into the receiver's memory, and the counts of
received rows stay on the device, so CUDA graphs can contain them.
"""

from typing import Any

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.deep_ep import import_buffer
from quire.layers.dispatch import Routed, Sent
from quire.layers.fixed_dispatch import FixedDispatch
from quire.parallel.experts import ExpertRanks
from quire.parallel.mesh import Communicator


def open_low_latency_buffer(group: Communicator, hidden: int, slots: int, room: int) -> Any:
    """Return the memory through which all layers exchange tokens. All ranks of the group must call it. slots: of all
    ranks. room: the largest number of tokens of a rank. Raises ConfigError if DeepEP cannot be used."""
    buffer = import_buffer()
    size = buffer.get_low_latency_rdma_size_hint(room, hidden, group.size, slots)
    queues = slots // group.size  # the kernels need one for each expert of a rank
    return buffer(group.group, 0, size, low_latency_mode=True, num_qps_per_rank=queues)


class DeepEPLowLatency(FixedDispatch):
    """A token is sent once for each of its experts. The kernel adds up its results on its original rank."""

    def __init__(self, builder: Builder, ranks: ExpertRanks, num_experts: int) -> None:
        super().__init__(builder, ranks, num_experts)
        self.buffer = ranks.buffer
        # of the buffer, the same in all steps
        self.room = -(-self.capacity.most // self.tensor_group.size)

    def send_fixed(
        self, x: Tensor, slots: Tensor, weights: Tensor, num_tokens: int, room: int, adapters: Tensor | None
    ) -> Sent:
        return _OnTheWay(self, x, slots, weights, num_tokens, room)


class _OnTheWay(Sent):
    def __init__(
        self, dispatch: DeepEPLowLatency, x: Tensor, slots: Tensor, weights: Tensor, num_tokens: int, room: int
    ) -> None:
        self.dispatch = dispatch
        self.slots = slots
        self.weights = weights
        self.num_tokens = num_tokens
        self.most_rows = dispatch.group.size * room * min(slots.shape[1], dispatch.count)
        # received: [own slots, ranks * most tokens, hidden], of which the first counts[slot] rows are filled
        self.received, self.counts, self.handle, _, self.hook = dispatch.buffer.low_latency_dispatch(
            x.contiguous(), slots, dispatch.room, len(dispatch.slots.experts), use_fp8=False, return_recv_hook=True
        )

    def receive(self) -> Routed:
        self.dispatch.ranks.turns.pass_on()
        self.hook()
        count, room, hidden = self.received.shape
        is_filled = torch.arange(room, device=self.counts.device) < self.counts[:, None]  # [own slots, room]
        # the filled rows first, in the order of their slots; a token chooses at most min(top_k, count) of them
        self.order = (~is_filled).flatten().sort(stable=True).indices[: self.most_rows]
        offsets = torch.nn.functional.pad(self.counts.long().cumsum(0), (1, 0))
        order = self.order
        return Routed(self.received.view(count * room, hidden)[order], offsets, lambda: (order, order // room))

    def collect(self, out: Tensor) -> Tensor:
        dispatch = self.dispatch
        results = torch.empty_like(self.received)  # the kernel reads only the filled rows
        results.view(-1, out.shape[1])[self.order] = out
        combined, _, hook = dispatch.buffer.low_latency_combine(
            results, self.slots, self.weights, self.handle, return_recv_hook=True
        )
        dispatch.ranks.turns.pass_on()
        hook()
        return dispatch.summand(combined, self.num_tokens)
