"""What the processes of a test use, by the kernel's accounts: processor time, waiting for a processor, and memory.

A test's processes are its own, with the servers in its threads, and all that it started: cores, ranks and the pool of
worker processes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_IS_COUNTED = Path("/proc/self/schedstat").exists()


def family() -> list[psutil.Process]:
    """This process and all that it started."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def memory() -> int:
    """Bytes that the family holds: anonymous and shared memory, a page of several processes once.

    Pages of files are left out. They are the kernel's to drop, and their share depends on who else has mapped the file.
    """
    held = 0
    for process in family():
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                name, *amount = line.split()
                if name in ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"):
                    held += int(amount[0]) << 10
    return held


@dataclass(frozen=True)
class Clocks:
    """Clocks of the family and of the machine, in seconds.

    waits: how long each thread of a server waited for a processor. used: processor time of the family. busy: processor
    time of all processes of the machine. stolen: time for which a virtual machine did not run, whose processors then
    neither worked nor were idle.
    """

    waits: Mapping[str, float]
    used: float
    busy: float
    stolen: float

    @classmethod
    def read(cls) -> Self:
        waits, used = dict[str, float](), 0.0
        for process in family():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                used += sum(process.cpu_times()[:4])  # with children that have ended
                if os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0):
                    waits |= _waits(process.pid)  # but not of worker processes, which always wait
        machine = psutil.cpu_times()
        busy = machine.user + machine.nice + machine.system
        passed = busy + machine.irq + machine.softirq + machine.idle + machine.iowait
        return cls(waits, used, busy, time.monotonic() - passed / (os.cpu_count() or 1))

    def lost_since(self, before: Self) -> float:
        """Seconds that other programs of the machine took from the family's threads.

        A thread that had no processor waited for others only as long as others had one. So what the family's own worker
        processes take is not counted.
        """
        waited = sum(max(0.0, wait - before.waits.get(thread, 0.0)) for thread, wait in self.waits.items())
        others = (self.busy - before.busy) - (self.used - before.used)
        return max(0.0, min(waited, others)) + max(0.0, self.stolen - before.stolen)


def _waits(pid: int) -> dict[str, float]:
    """By thread. Where the kernel does not count it, a thread may have waited all the time."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[task.name] = _wait(task / "schedstat")
    return found


def _wait(file: Path) -> float:
    return int(file.read_text().split()[1]) / 1e9 if _IS_COUNTED else time.monotonic()
