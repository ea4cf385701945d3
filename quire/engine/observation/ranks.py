"""Processor time and KV cache size of the ranks of a replica."""

import contextlib
from collections.abc import Sequence

import msgspec
import psutil

from quire.executor.base import Executor


class RankView(msgspec.Struct, omit_defaults=True):
    """block_bytes: size of the rank's part of a block. seconds: processor time that its process has used so far; None
    on another machine."""

    block_bytes: int
    seconds: float | None = None


class RankWatch:
    """Watches the rank processes. A replica with one rank has none."""

    def __init__(self, executor: Executor) -> None:
        rank_bytes: Sequence[int] = executor.kv_cache.rank_bytes
        self._rank_bytes = rank_bytes if len(rank_bytes) > 1 else ()
        self._processes: dict[int, psutil.Process] = {}
        for rank, pid in executor.processes().items():
            with contextlib.suppress(psutil.Error):
                self._processes[rank] = psutil.Process(pid)

    def views(self) -> list[RankView]:
        return [RankView(size, self._seconds(rank)) for rank, size in enumerate(self._rank_bytes)]

    def _seconds(self, rank: int) -> float | None:
        process = self._processes.get(rank)
        if process is None:
            return None
        try:
            times = process.cpu_times()
        except psutil.Error:  # the rank has ended
            return None
        return round(float(times.user + times.system), 2)
