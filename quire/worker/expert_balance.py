"""Moves experts between ranks, so that all ranks have about the same load (--enable-eplb).

Every `step_interval` steps, the ranks sum up how many tokens each expert has received, and each rank computes the same
new placement. Then experts of a few layers are sent after each step, while the next step runs.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from quire.parallel.mesh import Exchange

_LAYERS_AT_ONCE = 2  # whose experts are in transit during a step


class _Move(NamedTuple):
    """A copy of an expert from one slot to another."""

    source: int
    slot: int


class NoBalancer:
    """For a model whose experts are not moved."""

    def count_step(self) -> None:
        """Count a step. Call it after the forward of each step."""


class _Transit(NamedTuple):
    """The copies of a layer's experts that are being sent to other slots, into memory beside the weights in use.

    slots: the new expert of each slot of all ranks. moves: those to slots of this rank, in the order of the received
    rows. sent: kept until the exchange is completed.
    """

    layer: MoE
    slots: list[int]
    moves: list[_Move]
    exchange: Exchange
    sent: Tensor


class ExpertBalancer(NoBalancer):
    """Counts steps, which all ranks that share experts run together, and moves experts after some of them.

    A thread computes the new placement from the loads, and the ranks use it when all of their threads are done. Then a
    few layers are sent after each step, while the next step runs with the weights in use; the received copies overwrite
    these before the step after that. Tokens queue behind the experts on the same connections.
    """

    def __init__(self, layers: Sequence[MoE], options: BalanceOptions) -> None:
        self.layers = layers
        self.options = options
        self._steps = 0
        self._pool = ThreadPoolExecutor(1, "expert balance")  # starts a thread when it is used
        self._planning: Future[list[list[int]]] | None = None  # the new expert of each slot, for each layer
        self._planned: list[tuple[MoE, list[int]]] = []  # layers, and the new experts of their slots
        self._transit: list[_Transit] = []

    @torch.inference_mode()
    def count_step(self) -> None:
        self._steps += 1
        for transit in self._transit:
            _arrive(transit)
        self._transit = [_start(*self._planned.pop()) for _ in range(min(_LAYERS_AT_ONCE, len(self._planned)))]
        if self._planning is not None:
            self._adopt(self._planning)
        place = self._steps % self.options.step_interval
        if place == self.options.step_interval - self.options.window_size:
            for layer in self.layers:
                _loads(layer).zero_()
        if not place and self._planning is None and not self._planned and not self._transit:
            group = _dispatch(self.layers[0]).group
            loads = group.all_reduce(torch.stack([_loads(layer) for layer in self.layers]))
            self._planning = self._pool.submit(self._plan, loads, group.rank == 0)

    def _plan(self, loads: Tensor, logs: bool) -> list[list[int]]:
        """Return the new experts of each layer's slots. Runs on a thread. loads: [layers, experts], of all ranks."""
        before = []
        after = []
        planned = []
        for layer, of_experts in zip(self.layers, loads.tolist(), strict=True):
            dispatch = _dispatch(layer)
            slots = dispatch.slots.experts
            ranks = dispatch.group.size
            planned.append(balanced_slots(of_experts, slots, ranks))
            before.append(loads_of_ranks(of_experts, slots, ranks))
            after.append(loads_of_ranks(of_experts, planned[-1], ranks))
        if self.options.log_balancedness and logs:
            logger.info(
                "Experts: the mean load of a rank is %.2f of the largest, and will be %.2f",
                _balance(before),
                _balance(after),
            )
        return planned

    def _adopt(self, planning: Future[list[list[int]]]) -> None:
        """Use the new placement if it is ready on all ranks."""
        if not _dispatch(self.layers[0]).group.minimum(int(planning.done())):
            return
        self._planning = None
        pairs = zip(self.layers, planning.result(), strict=True)
        self._planned = [(layer, slots) for layer, slots in pairs if slots != _dispatch(layer).slots.experts]


def _start(layer: MoE, slots: list[int]) -> _Transit:
    """Start to copy experts so that each slot gets the given one. Slots are numbered across the ranks."""
    dispatch = _dispatch(layer)
    group = dispatch.group
    count = dispatch.count
    moves = [
        _Move(_source(dispatch.slots.experts, slot, slots[slot], count), slot)
        for slot in range(len(slots))
        if slots[slot] != dispatch.slots.experts[slot]
    ]
    sent = [move for move in moves if move.source // count == group.rank]  # sorted by the receiving rank
    received = sorted((m for m in moves if m.slot // count == group.rank), key=lambda m: m.source // count)
    rows = [_as_bytes(layer.expert(move.source - dispatch.first)) for move in sent]
    size = sum(tensor.nbytes for tensor in layer.expert(0))
    out = torch.stack(rows) if rows else torch.empty(0, size, dtype=torch.uint8, device=dispatch.device)
    ranks = range(group.size)
    to = [sum(move.slot // count == rank for move in sent) for rank in ranks]
    from_ = [sum(move.source // count == rank for move in received) for rank in ranks]
    return _Transit(layer, slots, received, group.all_to_all(out, to, from_), out)


def _arrive(transit: _Transit) -> None:
    """Overwrite the weights of a layer with the received experts."""
    dispatch = _dispatch(transit.layer)
    for move, row in zip(transit.moves, transit.exchange.wait(), strict=True):
        _fill(transit.layer.expert(move.slot - dispatch.first), row)
    dispatch.slots.put(transit.slots)


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
