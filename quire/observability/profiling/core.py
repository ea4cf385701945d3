"""A core's part of a profile: it counts steps, and tells its ranks when to record."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs
from torch.profiler import record_function

from quire.config.profiler import ProfilerConfig
from quire.messages.changes import PROFILE_SECONDS, Profile
from quire.messages.errors import error_text
from quire.messages.step import SchedulerOutput
from quire.observability.logging import logger
from quire.observability.profiling.trace import Trace, check_folder, core_name, make_trace
from quire.observability.profiling.watched_calls import core_calls, mark, watch

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


class _Running:
    """A running profile. plan: the remaining actions, each with the step that it precedes. problem: why the traces
    could not be written at the planned time. is_written: whether they have been written."""

    def __init__(self, order: Profile, options: ProfilerConfig) -> None:
        self.order = order
        self.plan = deque(options.plan)
        self.num_steps = 0
        self.is_recording = self.is_written = False
        self.trace: Trace | None = None  # trace of the core's own process
        self.ends: list[Callable[[], None]] = []  # functions that remove the marks of its stages
        self.problem = ""


class CoreProfiler:
    """Executes profile orders in a core. If the core's only rank is in the same process, there is one
    trace for both."""

    def __init__(self, core: "EngineCore") -> None:
        self._core = core
        self._running: _Running | None = None
        self._stop_counting: Callable[[], None] = lambda: None

    def obey(self, order: Profile) -> None:
        """Raises ValueError or OSError."""
        running = self._running
        if order.step == "start":
            if running is not None:
                raise ValueError("a profile runs already; stop it first")
            self._start(order)
        elif order.step == "stop":
            if running is None:
                raise ValueError("no profile runs; start one first")
            self._stop(running)
        elif running is not None and running.order.name == order.name:
            self._end(running, write=False)
            self._forget()

    def _start(self, order: Profile) -> None:
        options = ProfilerConfig(**order.options)
        check_folder(options)  # check now, even if the first steps are not recorded
        running = _Running(order, options)
        self._follow_plan(running)
        self._running = running
        self._stop_counting = watch(self._core.scheduler, "schedule", self._count)

    def _stop(self, running: _Running) -> None:
        self._forget()
        if running.is_recording:
            self._end(running, write=True)
        elif running.problem:
            raise ValueError(running.problem)
        elif not running.is_written:
            raise ValueError(
                f"nothing was recorded: there were {running.num_steps} steps, and profiler_config starts "
                f"with step {running.plan[0][0] + 1}"
            )

    def _forget(self) -> None:
        self._stop_counting()
        self._running = None
        self._stop_counting = lambda: None

    def _count(self, schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        """Count a step. Called instead of `schedule`."""
        running = self._running
        if running is not None:
            try:
                self._follow_plan(running)
            except (ValueError, OSError) as error:
                running.plan.clear()
                running.problem = error_text(error)
                logger.error("The profile failed: %s", running.problem)
        step = schedule()
        if running is not None and step.rows:
            running.num_steps += 1
        return step

    def _follow_plan(self, running: _Running) -> None:
        while running.plan and running.num_steps >= running.plan[0][0]:
            _, action = running.plan.popleft()
            if action == "start":
                self._begin(running)
            else:
                self._end(running, write=True)

    def _begin(self, running: _Running) -> None:
        order = running.order
        self._end(running, write=False)
        running.is_recording = True
        try:
            self._core.executor.change(order)
            if order.has_core:
                trace = make_trace(ProfilerConfig(**order.options), core_name(order))
                trace.start()
                running.trace = trace
        except ValueError:
            self._end(running, write=False)
            raise
        running.ends = mark(core_calls(self._core.scheduler), record_function)

    def _end(self, running: _Running, write: bool) -> None:
        if not running.is_recording:
            return
        for end in running.ends:
            end()
        trace = running.trace
        running.trace = None
        running.ends = []
        running.is_recording = False
        self._core.announce_silence(
            PROFILE_SECONDS
        )  # in this time, no thread of this process may be able to send heartbeats
        try:
            # The ranks still ignore this process's silence, since they are recording.
            _stop_both(trace, lambda: self._core.executor.change(_told(running.order, write)), write)
        finally:
            self._core.announce_silence(0)
        running.is_written = write


def _stop_both(trace: Trace | None, stop_ranks: Callable[[], None], write: bool) -> None:
    """Stop the recordings of a core and of its ranks, even if one of them fails."""
    try:
        if trace is not None:
            trace.stop(write)
    finally:
        stop_ranks()


def _told(order: Profile, write: bool) -> Profile:
    return structs.replace(order, step="stop" if write else "drop")
