"""Forwards that are recorded once and then replayed without Python."""

from dataclasses import dataclass

from torch import Tensor

from quire.attention.base import AttentionBackend, StepLayout
from quire.layers.attention import ForwardState
from quire.metrics.logging import logger
from quire.models.decoder import Decoder
from quire.ops.cpu.recording import Arena, Recording


@dataclass
class _Graph:
    """A recorded forward and the memory that it reads its step from."""

    recording: Recording
    x: Tensor
    state: ForwardState
    hidden: Tensor


class Graphs:
    """The layers of steps in which each request has one token: recorded when a number of requests is first met.

    A model whose layers are not kernels only (see Recording) is run as ever.
    """

    def __init__(self, model: Decoder, backend: AttentionBackend) -> None:
        self.model, self.backend = model, backend
        self.usable = True
        self._arena = Arena()
        self._graphs: dict[int, _Graph] = {}  # by number of requests

    def forward(
        self, x: Tensor, positions: Tensor, rotary: list[tuple[Tensor, Tensor]], layouts: list[StepLayout]
    ) -> Tensor:
        """x: [requests, hidden] -> Decoder.forward's result, valid until the next call."""
        graph = self._graphs.get(len(x))
        if graph is None:
            return self._record(x, ForwardState(positions, rotary, [self.backend.plan(layout) for layout in layouts]))
        graph.x.copy_(x)
        graph.state.positions.copy_(positions)
        for old, new in zip(graph.state.rotary, rotary, strict=True):
            old[0].copy_(new[0])
            old[1].copy_(new[1])
        for plan, layout in zip(graph.state.plans, layouts, strict=True):
            self.backend.plan(layout, plan)
        graph.recording.replay()
        return graph.hidden

    def _record(self, x: Tensor, state: ForwardState) -> Tensor:
        with Recording(self._arena) as recording:
            hidden = self.model.forward(x, state)
        if recording.obstacle is None:
            self._graphs[len(x)] = _Graph(recording, x, state, hidden)
        else:
            self.usable = False
            logger.debug("Steps are not recorded: the model's layers use %s", recording.obstacle)
        return hidden
