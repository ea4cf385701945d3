"""Commands that run as in a container: a read-only root, a user without a home or privileges, and no compiler."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import quire

# In a mount namespace of its own, everything is read-only but /dev/shm, which is small and where nothing may be
# executed, as in Docker.
_READ_ONLY = """
mount -o remount,bind,ro /
for folder in /tmp /var/tmp /run; do
    if mountpoint -q $folder; then mount -o remount,bind,ro $folder; fi
done
mount -t tmpfs -o size=1m,noexec,nosuid,nodev{options} tmpfs /dev/shm
"""
# A user that /etc/passwd does not know. keep: capabilities.
_UNPRIVILEGED = """setpriv --reuid=54321 --regid=54321 --clear-groups --no-new-privs --inh-caps=-all{keep} \
--ambient-caps=-all{keep} --bounding-set=-all{keep} --"""


def container(shared_memory: bool = True, **environment: str) -> list[str]:
    """A prefix of a command that runs it as in a container, as far as this user may create one.

    shared_memory: whether /dev/shm is writable. No other folder is.
    """
    script, privileges = "set -e\nulimit -n 64\ncd /\n", ""
    before = []
    if can_unshare():
        before = ["unshare", "--mount", "--propagation", "private"]
        script += _READ_ONLY.format(options="" if shared_memory else ",ro")
    if os.geteuid() == 0 and shutil.which("setpriv"):
        # Without this capability, an interpreter in root's own folder cannot be read. It does not allow writing.
        keep = "" if _others_can_enter(Path(sys.executable).resolve()) else ",+dac_read_search"
        privileges = _UNPRIVILEGED.format(keep=keep)
    script += f'exec {privileges} "$@"'
    path = f"PYTHONPATH={Path(quire.__file__).parents[1]}"
    clean = ["env", "-i", "PATH=/nonexistent", path, "OMP_NUM_THREADS=1"]
    if not before:
        environment["HOME"] = "/nonexistent"
    return [*before, "sh", "-c", script, "sh", *clean, *(f"{name}={value}" for name, value in environment.items())]


@functools.cache
def can_unshare() -> bool:
    """Whether this process may create mount namespaces. Root may, except in most containers."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        return False
    tried = ["unshare", "--mount", "--propagation", "private", "mount", "-o", "remount,bind,ro", "/"]
    return subprocess.run(tried, capture_output=True).returncode == 0


def _others_can_enter(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in path.parents)
