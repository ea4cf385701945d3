"""A rank's part of a profile."""

from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

from quire.config.profiler import ProfilerConfig
from quire.messages.changes import Profile
from quire.observability.profiling.trace import Trace, make_trace, rank_name
from quire.observability.profiling.watched_calls import mark, rank_calls


class RankProfiler:
    """Records the steps of a rank between the orders of its core, which counts the steps."""

    def __init__(self, runner: Any, rank: int) -> None:
        self._runner = runner
        self._rank = rank
        self._trace: Trace | None = None
        self._ends: list[Callable[[], None]] = []  # functions that remove the marks of stages

    def obey(self, order: Profile) -> None:
        """Execute an order. A "start" drops earlier recordings. Raises ValueError or OSError."""
        self._end(write=order.step == "stop")
        if order.step == "start":
            trace = make_trace(ProfilerConfig(**order.options), rank_name(order, self._rank))
            trace.start()
            self._trace, self._ends = trace, mark(rank_calls(self._runner), record_function)

    def _end(self, write: bool) -> None:
        for end in self._ends:
            end()
        trace = self._trace
        self._trace = None
        self._ends = []
        if trace is not None:
            trace.stop(write)
