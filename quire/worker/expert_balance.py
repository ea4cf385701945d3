"""Moves experts between ranks, so that all ranks have about the same load (--enable-eplb).

Every `step_interval` steps, the ranks sum up how many tokens each expert has received, and each rank computes the same
new placement. Then the experts of one layer are moved after each step, so that no step has to wait for more than one
layer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.config.engine import ParallelConfig
from quire.config.experts import BalanceOptions
from quire.layers.dispatch import DealtExperts
from quire.layers.moe import MoE
from quire.models.decoder import Decoder
from quire.models.model import Model
from quire.observability.logging import logger
from quire.parallel.experts import balanced_slots, loads_of_ranks


class _Move(NamedTuple):
    """A copy of an expert from one slot to another."""

    source: int
    slot: int


class NoBalancer:
    """For a model whose experts are not moved."""

    def count_step(self) -> None:
        """Count a step. Call it after the forward of each step."""


class ExpertBalancer(NoBalancer):
    """Counts steps, which all ranks that share experts run together, and moves experts after some of them."""

    def __init__(self, layers: Sequence[MoE], options: BalanceOptions) -> None:
        self.layers = layers
        self.options = options
        self._steps = 0
        self._planned: list[tuple[MoE, list[int]]] = []  # layers, and the new experts of their slots

    @torch.inference_mode()
    def count_step(self) -> None:
        self._steps += 1
        if self._planned:
            self._move(*self._planned.pop())
        place = self._steps % self.options.step_interval
        if place == self.options.step_interval - self.options.window_size:
            for layer in self.layers:
                _loads(layer).zero_()
        if not place:
            self._plan()

    def _plan(self) -> None:
        group = _dispatch(self.layers[0]).group
        loads: list[list[int]] = group.all_reduce(torch.stack([_loads(layer) for layer in self.layers])).tolist()
        before = []
        after = []
        for layer, of_experts in zip(self.layers, loads, strict=True):
            slots = _dispatch(layer).slots.experts
            new = balanced_slots(of_experts, slots, group.size)
            before.append(loads_of_ranks(of_experts, slots, group.size))
            after.append(loads_of_ranks(of_experts, new, group.size))
            if new != slots:
                self._planned.append((layer, new))
        if self.options.log_balancedness and group.rank == 0:
            logger.info(
                "Experts: %d layers move some; the mean load of a rank is %.2f of the largest, and will be %.2f",
                len(self._planned),
                _balance(before),
                _balance(after),
            )

    def _move(self, layer: MoE, slots: list[int]) -> None:
        """Copy experts so that each slot has the given one. Slots are numbered across the ranks."""
        dispatch = _dispatch(layer)
        group = dispatch.group
        count = dispatch.count
        first = dispatch.first
        moves = [
            _Move(_source(dispatch.slots.experts, slot, slots[slot], count), slot)
            for slot in range(len(slots))
            if slots[slot] != dispatch.slots.experts[slot]
        ]
        sent = [move for move in moves if move.source // count == group.rank]  # sorted by the receiving rank
        received = sorted((m for m in moves if m.slot // count == group.rank), key=lambda m: m.source // count)
        rows = [_as_bytes(layer.expert(move.source - first)) for move in sent]
        size = sum(tensor.nbytes for tensor in layer.expert(0))
        out = torch.stack(rows) if rows else torch.empty(0, size, dtype=torch.uint8, device=dispatch.device)
        ranks = range(group.size)
        to = [sum(move.slot // count == rank for move in sent) for rank in ranks]
        from_ = [sum(move.source // count == rank for move in received) for rank in ranks]
        for move, row in zip(received, group.all_to_all(out, to, from_).wait(), strict=True):
            _fill(layer.expert(move.slot - first), row)
        dispatch.slots.put(slots, dispatch.device)


def expert_balancer(model: Model, options: ParallelConfig) -> NoBalancer:
    """Return the balancer for a rank's part of a model. It does nothing without --enable-eplb, or if this rank shares
    no experts."""
    mlps = [layer.mlp for layer in model.layers] if isinstance(model, Decoder) else []
    layers = [mlp for mlp in mlps if isinstance(mlp, MoE) and isinstance(mlp.dispatch, DealtExperts)]
    return ExpertBalancer(layers, options.balance) if options.enable_eplb and layers else NoBalancer()


def _source(experts: list[int], slot: int, expert: int, count: int) -> int:
    """Return the slot from which an expert is copied to `slot`: on the same rank if possible, otherwise any, in turn.
    count: slots per rank."""
    holders = [holder for holder, of_holder in enumerate(experts) if of_holder == expert]
    return next((holder for holder in holders if holder // count == slot // count), holders[slot % len(holders)])


def _as_bytes(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def _fill(tensors: list[Tensor], row: Tensor) -> None:
    """Overwrite the tensors with the bytes of `row`."""
    for tensor, part in zip(tensors, torch.split(row, [tensor.nbytes for tensor in tensors]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _dispatch(layer: MoE) -> DealtExperts:
    assert isinstance(layer.dispatch, DealtExperts)
    return layer.dispatch


def _loads(layer: MoE) -> Tensor:
    assert layer.loads is not None
    return layer.loads


def _balance(loads: list[list[float]]) -> float:
    """Return the mean load of the ranks as a fraction of the largest load, over all layers."""
    return sum(sum(of_layer) / len(of_layer) for of_layer in loads) / max(1.0, sum(map(max, loads)))
