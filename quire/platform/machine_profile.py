"""The speed of this machine's kernels, measured by an earlier start, and the file that stores it. The file is a cache:
it may be deleted at any time, and a missing or damaged file, or one of another machine, is ignored.
"""

import contextlib
import hashlib
import math
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.messages.errors import error_text
from quire.platform.files import FileError, read_bytes
from quire.platform.folders import cache_folder
from quire.platform.limits import processors

VERSION = 1  # of the measurement: increase it to measure every machine again
_FOLDER = "machine"
_MOST_BYTES = 1 << 20
_QUIET_NOISE = 0.05  # maximum difference of the two fastest runs of a product on a quiet machine
_QUIET_SHARE = 0.85  # minimum share of the processors' time that the threads got during the measurement
_OLD = 30 * 86400.0  # seconds after which a profile is measured again: memory and hosts of virtual machines change
_NOISY_AGAIN = 3600.0  # the same for a profile of a busy machine
_TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology"

Rates = dict[str, dict[int, dict[int, float]]]


@dataclass(frozen=True)
class MachineProfile:
    """The results of the measurement. rates: operations per second (two for each weight and row) of products, by the
    kind of weights, the number of threads and the number of rows. With one row, reading the weights from memory limits
    the rate. calls: seconds of a tiny product, by the number of threads: the overhead of calling a kernel and
    distributing its work. threads: the maximum number of threads. noise: the relative difference of the two fastest
    runs of a product (median). share: the threads' share of the processors' time. measured_at: seconds since 1970.
    compiled: whether compiled kernels were measured rather than torch's operations.
    """

    rates: Rates
    calls: dict[int, float]
    threads: int
    noise: float
    share: float
    measured_at: float
    compiled: bool

    def __post_init__(self) -> None:
        numbers = [self.noise, self.share, self.measured_at, *self.calls.values()]
        for of_kind in self.rates.values():
            for of_threads in of_kind.values():
                numbers += of_threads.values()
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("a number of the profile is negative or not finite")
        counts = [self.threads, *self.calls, *(count for of_kind in self.rates.values() for count in of_kind)]
        if not all(1 <= count <= self.threads for count in counts):
            raise ValueError("a number of threads is out of range")

    @property
    def is_quiet(self) -> bool:
        """Whether the processors were otherwise idle during the measurement, so that the figures are reliable."""
        return self.noise <= _QUIET_NOISE and self.share >= _QUIET_SHARE

    def is_due(self, now: float) -> bool:
        """Whether the machine should be measured again."""
        age = now - self.measured_at
        return not 0 <= age < (_OLD if self.is_quiet else _NOISY_AGAIN)


def machine_key(kernels: Sequence[str], root: Path = Path("/")) -> str:
    """Return a hash of everything that the figures depend on. kernels: the factors of their speed other than the
    processor. root: of the file system, for tests.
    """
    allowed = processors(root)
    facts = [VERSION, platform.machine(), _processor(root), allowed, _cores(root), *kernels]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def read_profile(key: str) -> MachineProfile | None:
    """Read the profile that is stored under this key. None if there is no usable one."""
    path = _path(key)
    if path is None or not hasattr(os, "geteuid"):  # Windows
        return None
    try:
        for info in (path.stat(), path.parent.stat()):
            if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o002:
                return None  # another user may have written it
        digest, _, text = read_bytes(path, _MOST_BYTES).partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        return msgspec.json.decode(text, type=MachineProfile)
    except (OSError, FileError, ValueError):  # msgspec's errors are ValueErrors
        return None


def write_profile(key: str, profile: MachineProfile) -> str | None:
    """Store a profile for later starts. Returns the reason if that is not possible."""
    path = _path(key)
    if path is None:
        return "this user has no home folder"
    text = msgspec.json.encode(profile)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix="writing-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        return error_text(error)
    return None


def can_keep_profile() -> bool:
    """Whether a profile could be stored, so that measuring is useful."""
    folder = cache_folder()
    if folder is None:
        return False
    existing = next(path for path in (folder / _FOLDER, *(folder / _FOLDER).parents) if path.exists())
    return os.access(existing, os.W_OK | os.X_OK)


def is_better(new: MachineProfile, old: MachineProfile | None) -> bool:
    """Whether a new profile should replace the stored one. A profile of a busy machine does not replace one of a quiet
    machine."""
    return old is None or new.is_quiet or not old.is_quiet


def age_text(profile: MachineProfile) -> str:
    """Return the date of the measurement."""
    return time.strftime("%Y-%m-%d", time.gmtime(profile.measured_at))


def _path(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / _FOLDER / f"{key}.json"


def _processor(root: Path) -> list[str]:
    """Return the properties that identify the processor model, from Linux's description of the first one."""
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return [platform.processor()]
    names = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "cache size",
        "CPU implementer",
        "CPU part",
        "CPU revision",
    )
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return [f"{name.strip()}={value.strip()}" for name, _, value in fields if name.strip() in names]


def _cores(root: Path) -> int:
    """Return the number of physical cores on which this process may run. 0 if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return 0
    found = set()
    for number in os.sched_getaffinity(0):
        folder = root / _TOPOLOGY.format(number)
        names = ("core_cpus_list", "thread_siblings_list")
        with contextlib.suppress(OSError, StopIteration):
            found.add(next(folder / name for name in names if (folder / name).exists()).read_text().strip())
    return len(found)
