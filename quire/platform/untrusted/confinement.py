"""The limits that the operating system enforces for a job: processor time, memory, no network and no other processes.

They need no privileges, and work in a container with a read-only root and without a home. Without seccomp filters in
the kernel, or on processors other than x86-64 and ARM64, only the other limits apply.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
import tempfile

from quire.platform.untrusted.limits import Limits

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
# Half of a thread's stack. So data that fits into the stack here also fits where the result is used.
_STACK = 4 << 20

# System calls that fail with EPERM: sockets, programs, other processes, and io_uring, which could replace them.
_DENIED = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41,
            "connect": 42,
            "bind": 49,
            "fork": 57,
            "vfork": 58,
            "execve": 59,
            "kill": 62,
            "ptrace": 101,
            "tkill": 200,
            "unshare": 272,
            "setns": 308,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "execveat": 322,
            "pidfd_send_signal": 424,
            "io_uring_setup": 425,
            "io_uring_enter": 426,
            "io_uring_register": 427,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "unshare": 97,
            "ptrace": 117,
            "kill": 129,
            "tkill": 130,
            "socket": 198,
            "bind": 200,
            "connect": 203,
            "execve": 221,
            "setns": 268,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "execveat": 281,
            "pidfd_send_signal": 424,
            "io_uring_setup": 425,
            "io_uring_enter": 426,
            "io_uring_register": 427,
        },
    ),
}


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has already ended
        os._exit(1)


def confine(limits: Limits) -> None:
    """Apply the limits to this process irrevocably. It must not have used processor time yet."""
    if sys.platform == "linux":
        _write("/proc/self/oom_score_adj", "1000")  # the first to be killed when memory runs out
    used = _address_space()
    _limit(resource.RLIMIT_AS, used + limits.memory_bytes)
    _limit(resource.RLIMIT_STACK, _STACK)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    tempfile.tempdir = (
        "/"  # its search for a folder that it can write to would fail, also where only the name is needed
    )
    _deny_system_calls()
    # RLIMIT_CPU counts whole seconds, and still limits a job that replaces SIGPROF's default action.
    _limit(resource.RLIMIT_CPU, int(limits.cpu_seconds) + 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _address_space() -> int:
    """Return the size of this process's address space in bytes; 0 where /proc is hidden, which makes the limit
    stricter."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError:
        pass


def _deny_system_calls() -> None:
    if sys.platform != "linux" or platform.machine() not in _DENIED:
        return
    program = _filter(*_DENIED[platform.machine()])
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog {unsigned short len; struct sock_filter *filter;}
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0)  # fails if the kernel has no seccomp filters


def _filter(architecture: int, calls: dict[str, int]) -> bytes:
    """Return a BPF program over struct seccomp_data {int nr; u32 arch; ...} that denies `calls`, and calls of other
    ABIs."""
    load = 0x20
    equal = 0x15
    at_least = 0x35
    give = 0x06
    allow = 0x7FFF0000
    deny = 0x00050000 | errno.EPERM
    count = len(calls)
    lines = [(load, 0, 0, 4), (equal, 0, count + 3, architecture), (load, 0, 0, 0)]
    lines.append((at_least, count + 1, 0, 0x40000000))  # the x32 ABI has other numbers
    for index, number in enumerate(calls.values()):
        lines.append((equal, count - index, 0, number))
    lines += [(give, 0, 0, allow), (give, 0, 0, deny)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
