"""Checks of memory: how much is free, how fast it is, and how the system manages it."""

import resource
from collections.abc import Iterator
from pathlib import Path

from quire.cli.checks.finding import Finding, memory_text, note, ok, problem
from quire.cli.models.estimate import tokens_per_second
from quire.cli.models.machine import host_bandwidth
from quire.cli.models.words import speed_text
from quire.platform import limits

_LITTLE = 1 << 30  # bytes of free memory, below which only the smallest models run
_SWAPPED = 1 << 30  # bytes in swap, from which on it is worth a note
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_LEAST_MEASURED = 256 << 20  # bytes of free memory, below which its speed is not measured


def check_memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    free = limits.free_on_host()
    found = f"{memory_text(free)} free of {memory_text(memory.total)}"
    if free < memory.available:
        found += ", limited by a cgroup"
    if free < _LITTLE:
        yield problem(found, "End other programs, or raise the limit of the container.")
    else:
        yield ok(f"{found}; the KV cache takes half of what the weights leave, unless --kv-cache-memory-bytes is given")
    if swap.used > _SWAPPED:
        yield note(
            f"{memory_text(swap.used)} of memory are swapped out",
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
            f"this process may use only {memory_text(soft)} of addresses (ulimit -v)",
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
    """Raises OSError if there is not enough memory to measure it."""
    free = limits.free_on_host()
    if free < _LEAST_MEASURED:
        raise OSError("too little memory is free for a measurement")
    bandwidth = host_bandwidth(free)
    threads = limits.processors()
    speed = speed_text(tokens_per_second(1e9, bandwidth))
    yield ok(
        f"{bandwidth / 1e9:.1f} GB/s, by {threads} thread{'s' if threads > 1 else ''}; so a single answer of a model "
        f"with 1 GB of weights has about {speed} tokens/s on the CPU"
    )


def _read(path: Path) -> str:
    """Return the text of a small file, "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
