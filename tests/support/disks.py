"""A small disk for one server: a tmpfs in its own mount namespace, which can be full or read-only."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_SCRIPT = 'mount -t tmpfs -o "size=$1,mode=755" tmpfs "$2" && if [ -n "$3" ]; then mount -o remount,ro "$2"; fi && '
_FILLER = "filler"


@functools.cache
def can_mount() -> bool:
    """Whether this process may mount a tmpfs in a mount namespace of its own. Root may, except in most containers."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    tried = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return subprocess.run(tried, capture_output=True).returncode == 0


class Disk:
    """A tmpfs at `folder` for the process that `wrapper`, a prefix of a command, starts, and for its children. Other
    processes see an empty folder there. Skips the test if nothing can be mounted."""

    def __init__(self, folder: Path, size: str = "1m", read_only: bool = False) -> None:
        """size: as the option of tmpfs. read_only: from the beginning; such a disk is empty."""
        if not can_mount():
            pytest.skip("no disk can be mounted here; that takes root")
        folder.mkdir(exist_ok=True)
        script = _SCRIPT + 'shift 3 && exec "$@"'
        unshare = ["unshare", "--mount", "--propagation", "private"]
        self.wrapper = [*unshare, "sh", "-c", script, "sh", size, str(folder), "ro" if read_only else ""]
        self._folder, self._pid = folder, 0

    def of(self, pid: int) -> Disk:
        """The disk as the process with this id sees it; needed before all that follows."""
        self._pid = pid
        return self

    @property
    def path(self) -> Path:
        """The folder, as this process can reach it."""
        return Path(f"/proc/{self._pid}/root{self._folder}")

    def fill(self) -> None:
        """Take up all space that is left."""
        with (self.path / _FILLER).open("ab", buffering=0) as file:
            for size in (1 << 16, 1):
                with contextlib.suppress(OSError):  # no space is left
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        """Return the space."""
        (self.path / _FILLER).unlink()

    def remount(self, option: str) -> None:
        """option: ro or rw. A disk cannot become read-only while a file is open for writing."""
        command = ["nsenter", "--target", str(self._pid), "--mount", "mount", "-o", f"remount,{option}"]
        subprocess.run([*command, str(self._folder)], check=True, capture_output=True)
