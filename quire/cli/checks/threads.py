"""Checks of cores and threads."""

import os
from collections.abc import Iterator
from pathlib import Path

from quire.cli.checks.engine import num_threads
from quire.cli.checks.finding import Finding, note, ok, problem
from quire.platform import limits

_NODES = Path("/sys/devices/system/node")
_BUSY_SHARE = 0.5  # of the processors that other programs use, from which on it is worth a note
_FEWER_THREADS = 2  # than processors; docs/production.md recommends to leave at most this many to the API process


def check_cores() -> Iterator[Finding]:
    import psutil

    total = os.cpu_count() or 1
    allowed = limits.processors()
    by_affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    cores = psutil.cpu_count(logical=False)
    found = f"{allowed} of {total} processors may be used" if allowed < total else f"{total} processors"
    reasons = ["the affinity of this process"] if by_affinity < total else []
    reasons += ["the quota of a cgroup"] if allowed < by_affinity else []
    found += f", limited by {' and '.join(reasons)}" if reasons else ""
    found += f"; the machine has {cores} cores with {total // cores} threads each" if cores and cores < total else ""
    yield ok(found)
    if len(used := _nodes_used()) > 1:
        node, processors = next(iter(used.items()))
        yield note(
            f"they belong to {len(used)} NUMA nodes, and reading another node's memory is slow",
            f"Start a server on one node only: numactl --cpunodebind={node} --membind={node} quire serve ... (or "
            f"taskset --cpu-list {processors}).",
        )
    load = os.getloadavg()[0]
    if load > _BUSY_SHARE * total:
        yield note(
            f"programs kept {load:.1f} of {total} processors busy in the last minute",
            "Keep other programs off the cores of a server. Figures below may be too low.",
        )


def _nodes_used() -> dict[str, str]:
    """Return the NUMA nodes on which this process may run, each with its processors as the kernel lists them."""
    if not hasattr(os, "sched_getaffinity"):
        return {}
    allowed = os.sched_getaffinity(0)
    used = {}
    for folder in sorted(_NODES.glob("node[0-9]*")):
        listed = (folder / "cpulist").read_text().strip()
        if allowed & _processors(listed):
            used[folder.name.removeprefix("node")] = listed
    return used


def _processors(listed: str) -> set[int]:
    """Return the numbers in a kernel list, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def check_threads() -> Iterator[Finding]:
    wanted = os.environ.get("OMP_NUM_THREADS")
    allowed = limits.processors()
    count = num_threads()
    found = f"an engine starts {count}"
    if wanted is None:
        yield ok(found)
        return
    found += f" with OMP_NUM_THREADS={wanted}"
    number = wanted.partition(",")[0].strip()  # OpenMP allows a number for each level of nested regions
    if count > allowed:
        advice = f"Set OMP_NUM_THREADS to {allowed} or less, or unset it."
        yield problem(f"{found}, but only {allowed} can run at once, so they wait for each other in every step", advice)
    elif not number.isdecimal() or int(number) < 1:
        advice = "Set it to the number of cores of the server, less one or two, or unset it."
        yield note(f"{found}, which is not a number of threads", advice)
    elif count < allowed - _FEWER_THREADS:
        yield note(f"{found}, but {allowed} could run at once", "Raise OMP_NUM_THREADS, or unset it.")
    elif int(number) > allowed:
        yield note(f"{found}, which is more than the {allowed} that can run at once", "Lower OMP_NUM_THREADS.")
    else:
        yield ok(found)
