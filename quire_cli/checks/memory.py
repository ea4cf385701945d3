"""Checks of memory: how much is free, how fast it is, and what the system does with it."""

import contextlib
import mmap
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from quire.system import limits
from quire_cli.checks.engine import num_threads
from quire_cli.checks.finding import Finding, note, ok, problem, size_text

_LITTLE = 1 << 30  # bytes of free memory, below which only the smallest models run
_SWAPPED = 1 << 30  # bytes in swap, from which on it is worth a note
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_CACHES = Path("/sys/devices/system/cpu")
_LEAST_BUFFER, _CACHE_FACTOR, _FREE_SHARE = 256 << 20, 3, 4  # of the buffer whose reading is measured
_ROUNDS = 5


def check_memory() -> Iterator[Finding]:
    import psutil

    memory, swap, free = psutil.virtual_memory(), psutil.swap_memory(), limits.free_on_host()
    found = f"{size_text(free)} free of {size_text(memory.total)}"
    if free < memory.available:
        found += ", limited by a cgroup"
    if free < _LITTLE:
        yield problem(found, "End other programs, or raise the limit of the container.")
    else:
        yield ok(f"{found}; the KV cache takes half of what the weights leave, unless --kv-cache-memory-bytes is given")
    if swap.used > _SWAPPED:
        yield note(
            f"{size_text(swap.used)} of memory are swapped out",
            "If that happens to weights, steps wait for the disk. Free memory, or switch swap off (swapoff -a).",
        )
    if _read(_OVERCOMMIT) == "2":
        yield note(
            "the system promises no more memory than it has (vm.overcommit_memory = 2)",
            "If a start fails with 'Cannot allocate memory' although memory is free: sysctl vm.overcommit_memory=0",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield note(
            f"this process may use only {size_text(soft)} of addresses (ulimit -v)",
            "Remove the limit: libraries, weights and caches use addresses also where they use no memory.",
        )


def check_huge_pages() -> Iterator[Finding]:
    chosen = _read(_HUGE_PAGES).partition("[")[2].partition("]")[0]
    if chosen == "never":
        yield note(
            "switched off, so weights on the CPU are read 7 to 12 % slower",
            f"echo madvise > {_HUGE_PAGES} (as root, on the host)",
        )
    else:
        yield ok(f"the system gives transparent huge pages: {chosen or 'unknown'}")


def check_bandwidth() -> Iterator[Finding]:
    read, copied = rates()
    threads = _threads()
    yield ok(
        f"{read / 1e9:.1f} GB/s read, {copied / 1e9:.1f} GB/s copied, by {threads} thread{'s' if threads > 1 else ''}; "
        f"so a single answer of a model with 1 GB of weights has at most {read / 1e9:.0f} tokens/s on the CPU"
    )


@cache
def rates() -> tuple[float, float]:
    """Bytes a second that the threads of an engine read from memory, and that they read and write in a copy.

    Raises OSError if there is not enough memory to measure that.
    """
    import numpy as np

    threads = _threads()
    size = max(_LEAST_BUFFER, _CACHE_FACTOR * cache_bytes())
    size = min(size, limits.free_on_host() // _FREE_SHARE)
    part = size // threads // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    if size < _LEAST_BUFFER // 2 or not part:
        raise OSError("too little memory is free for a measurement")

    def prepare(_: int) -> Any:
        region = mmap.mmap(-1, 2 * part)
        with contextlib.suppress(AttributeError, OSError):  # where the system has no huge pages
            region.madvise(mmap.MADV_HUGEPAGE)  # weights lie on such pages, too
        array = np.frombuffer(region, np.uint8)
        array[:] = 1  # memory that was never written is not there
        return array

    with ThreadPoolExecutor(threads) as pool:
        arrays = list(pool.map(prepare, range(threads)))

        def fastest(work: Callable[[Any], Any]) -> float:
            """The seconds that all threads need together."""
            seconds = []
            for _ in range(_ROUNDS):
                started = time.perf_counter()
                list(pool.map(work, arrays))
                seconds.append(time.perf_counter() - started)
            return min(seconds)

        total = 2 * part * threads
        read = total / fastest(lambda array: array.max())
        return read, total / fastest(lambda array: np.copyto(array[:part], array[part:]))


def _threads() -> int:
    try:
        return num_threads()
    except RuntimeError:
        return limits.processors()


def cache_bytes() -> int:
    """The size of all last-level caches of the machine, as far as the system says it."""
    sizes = {}
    for folder in _CACHES.glob("cpu[0-9]*/cache/index3"):
        text = _read(folder / "size")
        if text.endswith("K") and text[:-1].isdecimal():
            sizes[_read(folder / "shared_cpu_list")] = int(text[:-1]) << 10
    return sum(sizes.values())


def _read(path: Path) -> str:
    """The text of a small file, "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
