"""Checks of the limits and settings of the system: open files, locked memory, core dumps, the kernel, the clock."""

import os
import resource
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import quire
from quire.cli.checks.finding import Finding, memory_text, note, ok, problem

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 1 << 30  # bytes of shared memory that NCCL's ranks on a machine may need
_SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
_LEAST_CONNECTIONS = 1024
_CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
_LEAST_PROCESSES = 512
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
_DAY = 86_400  # seconds


def check_open_files() -> Iterator[Finding]:
    from quire.server.listening import RESERVED_DESCRIPTORS, SMALL_LIMIT

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < SMALL_LIMIT:
        most = max(0, hard - 2 * RESERVED_DESCRIPTORS)
        yield problem(
            f"at most {hard}, so a server has fewer than {most} connections at once, and others wait",
            "Raise the hard limit: ulimit -Hn 65536, systemd's LimitNOFILE, or docker run --ulimit nofile=65536",
        )
        return
    text = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    raised = "" if soft == hard else f" (now {soft}; a server raises its own limit)"
    yield ok(f"at most {text}{raised}")


def check_processes() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY:
        yield ok("unlimited")
    elif soft < _LEAST_PROCESSES and os.geteuid() != 0:
        advice = "Raise the limit: ulimit -u 4096, or systemd's LimitNPROC."
        yield note(f"at most {soft} processes and threads of this user, and each rank has several", advice)
    else:
        yield ok(f"at most {soft} processes and threads of this user")


def check_locked_memory() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield ok("unlimited")
        return
    found = f"at most {memory_text(soft)}"
    if find_spec("nixl") is not None or any(Path("/sys/class/infiniband").glob("*")):
        advice = "Raise the limit: ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
        yield note(f"{found}, but RDMA (NIXL, NCCL over InfiniBand) locks the memory that it reads", advice)
    else:
        yield ok(f"{found}; only RDMA needs more, which this machine does not have")


def check_core_dumps() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if soft == 0:
        yield ok("off")
        return
    pattern = _text(_CORE_PATTERN)
    if pattern.startswith("|"):
        yield ok(f"on; a program takes them: {pattern[1:].split(' ')[0]}")
    else:
        yield note(
            "on: a crash writes all memory of the process to the disk, with weights and prompts",
            "ulimit -c 0, or systemd's LimitCORE=0",
        )


def check_shared_memory() -> Iterator[Finding]:
    if not _SHARED_MEMORY.is_dir():
        yield ok("there is no /dev/shm; ranks on CPUs do not need it")
        return
    facts = os.statvfs(_SHARED_MEMORY)
    size = facts.f_blocks * facts.f_frsize
    found = f"{memory_text(size)} in /dev/shm"
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) > 1 and size < _LEAST_SHARED:
        advice = "docker run --shm-size 1g, or --ipc host; on Kubernetes, a volume in memory at /dev/shm"
        yield note(f"{found}, which may be too little for ranks on several GPUs (NCCL)", advice)
    else:
        yield ok(f"{found}; ranks on CPUs share memory without it, and NCCL between GPUs uses it")


def check_connections() -> Iterator[Finding]:
    most = _text(_SOMAXCONN)
    if most.isdecimal() and int(most) < _LEAST_CONNECTIONS:
        advice = "sysctl net.core.somaxconn=4096"
        yield note(f"only {most} new ones may wait at a port; in a burst, others are delayed by seconds", advice)
    else:
        yield ok(f"{most or 'an unknown number of'} new ones may wait at a port")


def check_clock() -> Iterator[Finding]:
    now = time.time()
    installed = Path(quire.__file__).stat().st_mtime
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < installed - _DAY:
        advice = "Set the clock, or switch on NTP: with a wrong time, certificates of HTTPS look invalid."
        yield problem(f"it says {shown}, which is before Quire was installed", advice)
        return
    source = _text(_CLOCK_SOURCE)
    if source in _SLOW_CLOCKS:
        advice = f"If the machine has a stable TSC: echo tsc > {_CLOCK_SOURCE} (as root)"
        yield note(f"{shown}; the clock source {source} takes microseconds each time it is read", advice)
    else:
        yield ok(shown)


def _text(path: Path) -> str:
    """Return the text of a small file, "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
