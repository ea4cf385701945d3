"""The progress of an engine core, and the judgement whether it hangs.

Progress is a completed step: its results are known. A core owes progress while it has work, from when it begins with a
step until no work is left. It owes none while it starts, sleeps or is paused, while all its requests wait at gates, or
while it carries out a command, such as new weights.
"""

import time
from collections.abc import Callable, Iterable

from quire.messages.engine import Heartbeat
from quire.messages.step import SchedulerOutput

LEAST_SECONDS = 60.0
FACTOR = 10.0  # of the longest step seen; and of the limit, while a step may compile
_LONGEST_BEAT_SECONDS = 2.0


class Progress:
    """Of a core, on its thread. `Beats` reads it on another one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.since: float | None = None  # when the core began to owe progress, or the last step completed
        self.num_tokens = 0  # of the largest step in flight
        self.encodes = False  # whether a step in flight encodes media
        self.longest, self.most_tokens = 0.0, 0  # of the completed steps but the first, which may compile
        self.has_run = self.has_encoded = False

    def begin(self) -> None:
        """The core is about to run a step."""
        if self.since is None:
            self.since = self._now()

    def submit(self, step: SchedulerOutput) -> None:
        self.num_tokens = max(self.num_tokens, sum(step.num_tokens))
        self.encodes = self.encodes or bool(step.encode)

    def complete(self, step: SchedulerOutput, in_flight: Iterable[SchedulerOutput]) -> None:
        """A step was completed. in_flight: the later ones."""
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
        """The core owes nothing until the next step."""
        self.since = None

    def allow(self, seconds: float) -> None:
        """Other replicas may take as long as this one did, for what is no step, and let this one wait in a step."""
        self.longest = max(self.longest, seconds)


class Beats:
    """Makes the heartbeats of a core. It counts time from beat to beat, so the time for which the whole process was
    stopped does not count."""

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
    """Judges by the heartbeats of a replica whether its core hangs. It remembers what the cores before have done.

    By default, a core may wait for a step ten times as long as for the longest one so far, but at least 60 s. If a step
    has more tokens than any before, it may take longer in proportion. The first step, and the first one that encodes
    media, may take ten times that limit, since kernels may be compiled.
    """

    def __init__(self, timeout: float | None, compiles: bool = False) -> None:
        """timeout: in seconds, instead of the limit that follows from the steps; 0 for no watchdog. compiles: whether
        any step may compile."""
        self._timeout = timeout
        self._compiles = compiles
        self._longest = 0.0
        self._most_tokens = 0
        self._has_run = self._has_encoded = False

    def problem(self, beat: Heartbeat) -> str | None:
        """What is wrong, if the core hangs."""
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
