"""Reads how much memory and how many processors this process may use: the limits of its cgroup and all parent cgroups.

A cgroup is a folder in the cgroup file system (version 1 has one file system for each controller). Every folder from
the process's own up to the root of the mount may set limits, and all of them apply:

    version 2                                version 1
    /sys/fs/cgroup                           /sys/fs/cgroup/memory
      machine.slice/cpu.max = 400000 100000    docker/memory.limit_in_bytes = 8589934592
        pod/memory.max = 2147483648              a1b2c3/memory.limit_in_bytes = 2147483648

A container sees its own folder as the root of the mount. The argument `root` replaces the file system's root in tests.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60  # bytes; without a limit, version 1 shows at least this number


def free_memory(root: Path = Path("/"), mapped: int = 0) -> int | None:
    """Return the bytes left in the cgroups: limit - usage + reclaimable page cache. None without a limit.

    mapped: bytes of files that must stay in the page cache, even if they are not in it yet.
    """
    free = []
    for folder in _cgroups("memory", root):
        limits = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        limit = min((n for n in limits if n is not None), default=_NO_LIMIT)
        if limit < _NO_LIMIT:
            usages = _number(folder / "memory.current"), _number(folder / "memory.usage_in_bytes")
            used = next((n for n in usages if n is not None), 0)
            free.append(max(0, limit - used + _reclaimable(folder, mapped)))
    return min(free, default=None)


def free_on_host(mapped: int = 0) -> int:
    """Return the free bytes of the machine, or of this process's cgroup if it has fewer. mapped: see `free_memory`."""
    import psutil  # imported here, since an engine on a GPU does not need it

    available: int = psutil.virtual_memory().available - mapped
    allowed = free_memory(mapped=mapped)
    return available if allowed is None else min(available, allowed)


def processors(root: Path = Path("/")) -> int:
    """Return the number of processors for this process, from its affinity (which includes cpusets) and the cgroups'
    quotas. A quota of 2.5 processors is rounded down to 2: 3 threads would be throttled in each step.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(folder) for folder in _cgroups("cpu", root))
    return max(1, min([allowed, *(int(quota) for quota in quotas if quota is not None)]))


def _quota(folder: Path) -> float | None:
    """Return a cgroup's quota in processors."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)  # the quota "max" raises ValueError
    quota_us = _number(folder / "cpu.cfs_quota_us")
    period_us = _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us is not None and quota_us > 0 and period_us else None


def _reclaimable(folder: Path, mapped: int) -> int:
    """Return the bytes of inactive cached files of this cgroup and its children, without `mapped` bytes. Those may be
    among the inactive or the active files, or (if other cgroups use them too) in neither."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        unused, used = (
            int(counts.get(f"total_{name}_file") or counts.get(f"{name}_file") or 0) for name in ("inactive", "active")
        )
        return unused + min(used, mapped) - mapped
    return -mapped


def _number(path: Path) -> int | None:
    """Return the number in a file. None if the file is missing or contains "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Return the folders whose limits apply to this process, for cgroups version 1 or 2."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return
    paths = {name: path for line in memberships for _, names, path in [line.split(":", 2)] for name in names.split(",")}
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        name = {"cgroup2": "", "cgroup": controller}.get(kind)
        if name is None or name not in paths or (name and name not in options.split(",")):
            continue
        top, mount = (field.encode().decode("unicode_escape") for field in before.split()[3:5])
        path = paths[name]
        top = top.rstrip("/")
        # A path outside this mount is treated as the root of the mount.
        below = path[len(top) :].strip("/") if f"{path}/".startswith(f"{top}/") else ""
        mounted = root / mount.strip("/")
        folder = mounted / below
        if ".." in folder.parts or not folder.is_dir():
            folder = mounted
        yield from (f for f in (folder, *folder.parents) if f.is_relative_to(mounted))


def has_gpu_driver() -> bool:
    """Whether this machine may have a GPU: there is a driver of NVIDIA or AMD, or it runs Windows."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))
