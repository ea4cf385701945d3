"""Lets other threads wait for layers of steps that a rank computes."""

import threading
from collections import deque
from collections.abc import Callable

Mark = Callable[[], None]  # waits until the device has completed all previously submitted work

NOT_RUN = -1
ALL_LAYERS = 1 << 30
_REMEMBERED = 1 << 16  # steps; more than a rank runs in a minute
_MOST_ENDS = 8


class NoClock:
    """For a rank whose layers no thread waits for."""

    def begin(self, step_id: int) -> None:
        """Called before a step is submitted."""

    def end(self, has_run: bool) -> None:
        """Called when the step has been submitted. has_run: False if it was skipped."""


class StepClock(NoClock):
    """`begin`, `layer_done` and `end` are called on the thread that submits steps, and `wait` on others. ticks: how
    often a layer or a step has been submitted."""

    def __init__(self, layers: range, mark: Callable[[], Mark]) -> None:
        """layers: of this rank's stage. mark: returns a Mark."""
        self._layers = layers
        self._mark = mark
        self._changed = threading.Condition()
        self._has_run = bytearray(_REMEMBERED)  # by step id, modulo its length
        self._step: int | None = None  # the step being submitted
        self._last = 0  # the last submitted step
        self._marks: list[Mark] = []  # after each layer of the step
        self._ends: deque[tuple[int, Mark]] = deque(maxlen=_MOST_ENDS)  # after the last steps
        self.ticks = 0

    def begin(self, step_id: int) -> None:
        with self._changed:
            for missing in range(max(self._last + 1, step_id - _REMEMBERED), step_id):
                self._has_run[missing % _REMEMBERED] = False
            self._step = step_id
            self._marks = []

    def layer_done(self) -> None:
        mark = self._mark()
        with self._changed:
            self._marks.append(mark)
            self._tick()

    def end(self, has_run: bool) -> None:
        mark = self._mark()
        with self._changed:
            assert self._step is not None
            self._has_run[self._step % _REMEMBERED] = has_run
            self._ends.append((self._step, mark))
            self._last = self._step
            self._step = None
            self._tick()

    def _tick(self) -> None:
        self.ticks += 1
        self._changed.notify_all()

    def wait(self, step_id: int, layer: int, seconds: float) -> tuple[int, int]:
        """Wait until the layers of a step below `layer` have been computed, but no longer than `seconds`. Returns two
        values: first, the layer below which all of the rank's layers have been computed, ALL_LAYERS, or NOT_RUN if the
        step was not run or is no longer remembered; second, `ticks`."""
        wanted = min(layer, self._layers.stop) - self._layers.start
        with self._changed:
            self._changed.wait_for(lambda: not 0 <= self._computed(step_id) < wanted, seconds)
            computed = self._computed(step_id)
            ticks = self.ticks
            mark = self._mark_of(step_id)
        if computed > 0 and mark is not None:
            mark()
        if computed == len(self._layers):
            return ALL_LAYERS, ticks
        return (NOT_RUN if computed == NOT_RUN else self._layers.start + computed), ticks

    def _computed(self, step_id: int) -> int:
        """Return the number of computed layers."""
        if step_id == self._step:
            return min(len(self._marks), len(self._layers))
        if step_id > self._last:
            return 0 if self._step is None or step_id > self._step else NOT_RUN
        is_known = step_id > self._last - _REMEMBERED and self._has_run[step_id % _REMEMBERED]
        return len(self._layers) if is_known else NOT_RUN

    def _mark_of(self, step_id: int) -> Mark | None:
        if step_id == self._step:
            return self._marks[-1] if self._marks else None
        return next((mark for ended, mark in self._ends if ended >= step_id), None)
