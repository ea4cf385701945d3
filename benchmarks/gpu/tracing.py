"""The simulated GPU (quire/cli/simulated_gpu.py), with a record of the engine's launches and compilations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from quire.cli import simulated_gpu as plain
from quire.cli.simulated_gpu import Graph
from quire.platform.gpu.cards import Card


@dataclass
class Launch:
    """Work that the engine submitted to the device. See StandIn.launched for the fields."""

    name: str
    arguments: dict[str, Any]
    grid: tuple[int, ...] = ()
    kernel: Any = None
    result: Any = None


@dataclass
class TracedStandIn(plain.SimulatedGpu):
    """compilations: one line for each kernel that Triton compiled or read from its cache. launches: filled within
    `traced`. traces_graphs: whether the launches of replayed graphs are recorded. If so, graphs keep all their tensors.
    """

    compilations: list[str] = field(default_factory=list)
    launches: list[Launch] | None = None
    traces_graphs: bool = True

    @contextlib.contextmanager
    def traced(self) -> Iterator[list[Launch]]:
        """Record the launches within this block."""
        before = self.launches
        self.launches = []
        try:
            yield self.launches
        finally:
            self.launches = before

    def launched(self, *what: Any, **more: Any) -> None:
        if self.launches is not None:
            self.launches.append(Launch(*what, **more))

    @property
    def graph(self) -> type:
        return type("CUDAGraph", (_TracedGraph,), {"_device": self})


class _TracedGraph(Graph):
    """Records the launches that it captures. A replay adds them to the device's launches."""

    _device: TracedStandIn

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._launches: list[Launch] = []

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        super().capture_begin(*args, **kwargs)
        self._before = self._device.launches
        self._device.launches = self._launches if self._device.traces_graphs else None

    def capture_end(self) -> None:
        self._device.launches = self._before
        super().capture_end()

    def replay(self) -> None:
        super().replay()
        if self._device.launches is not None:
            self._device.launches += self._launches


@contextlib.contextmanager
def stand_in(card: Card, count: int = 1) -> Iterator[TracedStandIn]:
    """As quire.cli.simulated_gpu.stand_in."""
    import triton

    device = TracedStandIn(card)

    def compiled(*, fn: Any, compile: Any, **_: Any) -> None:
        device.compilations.append(_specialization(fn, compile))

    hook = mock.patch.object(triton.knobs.runtime, "jit_post_compile_hook", compiled)
    with plain.stand_in(card, count, device), hook:
        yield device


def _specialization(function: Any, compilation: Any) -> str:
    """Return a kernel's name and specialization: types of arguments ("*bf16 % 16" is an aligned pointer) and
    constants."""
    aligned = {path[0] for path, value in compilation["configs"][0].items() if value}
    constants = {path[0]: value for path, value in compilation["constants"].items()}
    arguments = [
        f"{name}={constants[place]!r}" if place in constants else f"{name}: {kind}{' % 16' * (place in aligned)}"
        for place, (name, kind) in enumerate(compilation["signature"].items())
    ]
    return f"{function.name}[num_warps={compilation['num_warps']}]({', '.join(arguments)})"
