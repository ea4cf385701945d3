"""Compiled kernels that an engine gets late, at a moment that a test chooses. Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable

from quire.ops.cpu import build


class LateKernels:
    """In place of a quire.ops.cpu.background.Background."""

    seconds = 1.0

    def __init__(self) -> None:
        self.problem, self.has_ended = "", False
        self._wake: list[Callable[[], None]] = []

    def connect(self, wake: Callable[[], None]) -> None:
        self._wake.append(wake)

    def arrive(self, problem: str = "") -> None:
        self.problem, self.has_ended = problem, True
        build.library.cache_clear()
        for wake in self._wake:
            wake()

    def wait(self) -> None:
        if not self.has_ended:
            self.arrive()
