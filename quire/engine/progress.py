"""Tracks the progress of an engine core to detect hangs.

A core makes progress when it completes a step, that is, when the results are known. Progress is expected while a core
has work, from the beginning of a step until no work is left. It is not expected while the core starts, sleeps or is
paused, while all its requests wait at gates, or while it carries out a command, such as a weight update.
"""

import time
from collections.abc import Callable, Iterable

from quire.messages.engine import Heartbeat
from quire.messages.step import SchedulerOutput

LEAST_SECONDS = 60.0
FACTOR = 10.0  # times the longest step; also times the limit, while a step may compile
_LONGEST_BEAT_SECONDS = 2.0


class Progress:
    """The progress of a core. Written on the core's thread, read by `Beats` on another."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.since: float | None = None  # when progress was first expected, or the last step completed
        self.num_tokens = 0  # of the largest step in flight
        self.encodes = False  # whether a step in flight encodes media
        self.longest, self.most_tokens = 0.0, 0  # of all completed steps except the first, which may compile
        self.has_run = self.has_encoded = False

    def begin(self) -> None:
        """Called before the core runs a step."""
        if self.since is None:
            self.since = self._now()

    def submit(self, step: SchedulerOutput) -> None:
        self.num_tokens = max(self.num_tokens, sum(step.num_tokens))
        self.encodes = self.encodes or bool(step.encode)

    def complete(self, step: SchedulerOutput, in_flight: Iterable[SchedulerOutput]) -> None:
        """Record a completed step. in_flight: the later steps."""
        now = self._now()
        took = now - (now if self.since is None else self.since)
        may_compile = not self.has_run or (step.encode and not self.has_encoded)
        if not may_compile:
            self.longest = max(self.longest, took)
            self.most_tokens = max(self.most_tokens, sum(step.num_tokens))
        self.has_run = True
        self.has_encoded = self.has_encoded or bool(step.encode)
        self.since = now
        self.num_tokens = 0
        self.encodes = False
        for later in in_flight:
            self.submit(later)

    def stop(self) -> None:
        """Expect no progress until the next step."""
        self.since = None

    def allow(self, seconds: float) -> None:
        """Count a time that this replica spent outside steps as a possible duration of a step: other replicas may spend
        as much while this one waits for them in a step."""
        self.longest = max(self.longest, seconds)


class Beats:
    """Makes the heartbeats of a core. Time is counted from beat to beat, which excludes time while the whole process
    was stopped."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._last = now, now()
        self._since: float | None = None
        self._waited = 0.0

    def next(self, progress: Progress | None) -> Heartbeat:
        """progress: None while the core starts."""
        now = self._now()
        since = None if progress is None else progress.since
        elapsed = min(now - self._last, _LONGEST_BEAT_SECONDS)
        self._last = now
        if since is None or progress is None:
            self._since = None
            self._waited = 0.0
            return Heartbeat()
        self._waited = self._waited + elapsed if since == self._since else min(now - since, elapsed)
        self._since = since
        return Heartbeat(
            self._waited,
            progress.num_tokens,
            progress.encodes,
            progress.longest,
            progress.most_tokens,
            progress.has_run,
            progress.has_encoded,
        )


class Watchdog:
    """Detects from the heartbeats of a replica whether its core hangs. It remembers the step times of earlier cores.

    By default, a step may take ten times as long as the longest step so far, but at least 60 s. If a step has more
    tokens than any earlier one, the limit grows in proportion. The first step, and the first one that encodes media,
    may take ten times that limit, since kernels may be compiled.
    """

    def __init__(self, timeout: float | None, compiles: bool = False) -> None:
        """timeout: a fixed limit in seconds; None to derive it from the steps, 0 for no watchdog. compiles: whether any
        step may compile."""
        self._timeout = timeout
        self._compiles = compiles
        self._longest = 0.0
        self._most_tokens = 0
        self._has_run = self._has_encoded = False

    def problem(self, beat: Heartbeat) -> str | None:
        """Return a description of the problem if the core hangs, otherwise None."""
        self._longest = max(self._longest, beat.longest)
        self._most_tokens = max(self._most_tokens, beat.most_tokens)
        self._has_run = self._has_run or beat.has_run
        self._has_encoded = self._has_encoded or beat.has_encoded
        if self._timeout == 0 or beat.waited <= (limit := self._limit(beat)):
            return None
        return f"it has had work for {beat.waited:.0f} s, and completed no step (--watchdog-timeout: {limit:.0f} s)"

    def _limit(self, beat: Heartbeat) -> float:
        limit = self._timeout
        if limit is None:
            growth = max(1.0, beat.num_tokens / self._most_tokens) if self._most_tokens else 1.0
            limit = max(LEAST_SECONDS, FACTOR * self._longest * growth)
        may_compile = self._compiles or not self._has_run or (beat.encodes and not self._has_encoded)
        return limit * FACTOR if may_compile else limit
