"""Exchanges tokens between GPUs with the high-throughput kernels of DeepEP (github.com/deepseek-ai/DeepEP). It requires
the package deep_ep and is selected with --all2all-backend deepep_high_throughput."""

from typing import Any

import torch
from torch import Tensor

from quire.config.declaration import ConfigError
from quire.layers.build import Builder
from quire.layers.dispatch import Exchanged, OwnTokens, Routed, Sent
from quire.messages.errors import error_text
from quire.parallel.experts import ExpertRanks
from quire.parallel.mesh import Communicator


def import_buffer() -> Any:
    """Return DeepEP's class Buffer. Raises ConfigError if it cannot be imported."""
    try:
        from deep_ep import Buffer
    except ImportError as error:
        raise ConfigError(
            f"all2all_backend: DeepEP's package deep_ep cannot be imported ({error_text(error)})"
        ) from None
    return Buffer


def open_buffer(group: Communicator, dtype: torch.dtype, device: torch.device, hidden_size: int) -> Any:
    """Return the memory through which all layers exchange tokens. All ranks of the group must call it. Raises
    ConfigError if DeepEP cannot be used. DeepEP itself pickles the messages that its ranks exchange here."""
    buffer = import_buffer()
    size = hidden_size * dtype.itemsize
    configs = (buffer.get_dispatch_config, buffer.get_combine_config)
    hints = [
        (config.get_nvl_buffer_size_hint(size, group.size), config.get_rdma_buffer_size_hint(size, group.size))
        for config in (get(group.size) for get in configs)
    ]
    return buffer(group.group, *map(max, zip(*hints, strict=True)))


class DeepEP(Exchanged):
    """A token's results are summed on each rank that has some of its experts, and then by the kernel. So their last
    bits depend on the placement of experts."""

    def __init__(self, builder: Builder, ranks: ExpertRanks, num_experts: int) -> None:
        super().__init__(builder, ranks, num_experts)
        self.buffer = ranks.buffer

    def send(
        self, x: Tensor, experts: Tensor, weights: Tensor | None, num_tokens: int, adapters: Tensor | None = None
    ) -> Sent:
        return _OnTheWay(self, x, self.slots.of(experts), weights, num_tokens)


class _OnTheWay(Sent):
    def __init__(self, dispatch: DeepEP, x: Tensor, slots: Tensor, weights: Tensor | None, num_tokens: int) -> None:
        self.dispatch = dispatch
        self.num_tokens = num_tokens
        buffer = dispatch.buffer
        of_rank, of_node, of_expert, is_sent, _ = buffer.get_dispatch_layout(slots, len(dispatch.slots.experts))
        self.x, self.slots, self.weights, _, self.handle, self.event = buffer.dispatch(
            x,
            num_tokens_per_rank=of_rank,
            num_tokens_per_rdma_rank=of_node,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=of_expert,
            topk_idx=slots,
            async_finish=True,
            topk_weights=torch.ones(slots.shape, device=slots.device) if weights is None else weights,
        )

    def receive(self) -> Routed:
        dispatch = self.dispatch
        dispatch.ranks.turns.pass_on()
        self.event.current_stream_wait()
        elsewhere = self.slots < 0
        slots = self.slots.masked_fill(elsewhere, dispatch.count)
        weights = self.weights.masked_fill(elsewhere, 0)
        self.own = OwnTokens(dispatch.kernels, self.x, slots, weights, dispatch.bounds)
        return self.own.receive()

    def collect(self, out: Tensor) -> Tensor:
        dispatch = self.dispatch
        combined, _, event = dispatch.buffer.combine(self.own.collect(out), self.handle, async_finish=True)
        dispatch.ranks.turns.pass_on()
        event.current_stream_wait()
        return dispatch.summand(combined, self.num_tokens)
