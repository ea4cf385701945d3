"""The periodic log line: an engine's throughput while it has work."""

import time
from itertools import zip_longest

from quire.messages.engine import CoreStats, SpeculationStats
from quire.observability.logging import logger

LOG_SECONDS = 10.0


class ThroughputLog:
    """Logs a line when LOG_SECONDS have passed since the last one, or since work began after a pause.

    Rates are averages over the time with work: idle time is not counted and produces no lines.
    """

    def __init__(self) -> None:
        self._working_since: float | None = None
        self._logged = SpeculationStats()  # stats up to the last line
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self._began_at = now
        self._work_seconds = 0.0  # in periods of work that have ended
        self._prompt_tokens = self._generated = self._queries = self._hits = self._preemptions = 0

    def begin_work(self) -> None:
        """Record that an idle engine received a request. Has no effect if the engine already has work."""
        if self._working_since is not None:
            return
        self._working_since = time.monotonic()
        if not self._prompt_tokens + self._generated:
            self._reset(self._working_since)

    def end_work(self) -> None:
        """Record that the last request has ended."""
        if self._working_since is not None:
            self._work_seconds += time.monotonic() - self._working_since
            self._working_since = None

    def step(
        self, stats: CoreStats, prompt_tokens: int, generated: int, queries: int, hits: int, preemptions: int = 0
    ) -> None:
        """Record a finished step. The numbers count tokens; queries and hits refer to the prefix cache. preemptions:
        preempted requests."""
        self._prompt_tokens += prompt_tokens
        self._generated += generated
        self._queries += queries
        self._hits += hits
        self._preemptions += preemptions
        now = time.monotonic()
        seconds = self._work_seconds + (0.0 if self._working_since is None else now - self._working_since)
        if now - self._began_at < LOG_SECONDS or not seconds or not self._prompt_tokens + self._generated:
            return
        preempted = f", preemptions {self._preemptions}" if self._preemptions else ""
        found = f"{100 * self._hits / self._queries:.1f} %" if self._queries else "none looked up"
        logger.info(
            "Running %d, waiting %d; computed %.1f prompt tokens/s, generated %.1f tokens/s in %.1f s of work; "
            "KV cache %.1f %% in use, prefix cache hits %s%s%s",
            stats.num_running,
            stats.num_waiting,
            self._prompt_tokens / seconds,
            self._generated / seconds,
            seconds,
            100 * stats.kv_cache_usage,
            found,
            preempted,
            self._speculation(stats),
        )
        self._reset(now)
        if self._working_since is not None:
            self._working_since = now

    def _speculation(self, stats: CoreStats) -> str:
        """Return the line's part about drafts; empty if there were none."""
        now = stats.speculation or SpeculationStats()
        before = self._logged
        self._logged = now
        drafts = now.drafts - before.drafts
        drafted = now.draft_tokens - before.draft_tokens
        if drafts <= 0:  # a new core counts from zero
            return ""
        accepted = now.accepted_tokens - before.accepted_tokens
        places = zip_longest(now.accepted_at, before.accepted_at, fillvalue=0)
        rates = [f"{(after - earlier) / drafts:.2f}" for after, earlier in places if after > earlier]
        by_place = f" (by position {' '.join(rates)})" if rates else ""
        length = 1 + accepted / drafts
        return f"; mean acceptance length {length:.2f}, drafts accepted {100 * accepted / drafted:.0f} %{by_place}"
