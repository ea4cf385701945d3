"""Real cgroups, for tests that run a command with less memory or fewer processors than the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from quire.platform import limits

MEMORY = ("memory.max", "memory.limit_in_bytes")  # of version 2 and 1
QUOTA = ("cpu.max", "cpu.cfs_quota_us")


class Cgroup:
    """wrapper: a prefix of a command that runs it in this cgroup."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wrapper = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh"]

    def number(self, *names: str) -> int:
        """The number in the first of these files that exists."""
        return next(int((self.folder / n).read_text()) for n in names if (self.folder / n).exists())

    @property
    def peak_memory(self) -> int:
        """In bytes, including the page cache."""
        return self.number("memory.peak", "memory.max_usage_in_bytes")


@contextmanager
def cgroup(controller: str, names: tuple[str, str], value: int) -> Iterator[Cgroup]:
    """A cgroup with a limit, below this process's own cgroup or an ancestor. Skips the test if none can be created.

    names: the file of the limit in both versions.
    """
    for parent in limits._cgroups(controller, Path("/")):
        folder = parent / f"quire-test-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
        for name in names:
            with suppress(OSError):
                if (folder / name).exists():
                    (folder / name).write_text(str(value))
                    break
        else:
            with suppress(OSError):
                folder.rmdir()
            continue
        try:
            yield Cgroup(folder)
        finally:
            folder.rmdir()
        return
    pytest.skip(f"no cgroup with a limit for {controller} can be made here; that takes root")
