"""Commands that run as in a container: a read-only root, a user without a home or privileges, and no compiler."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import quire

# In a mount namespace of its own: everything is read-only but /dev/shm, which is small, and where nothing may be
# executed, as in Docker. Then the command runs as a user that /etc/passwd does not know.
_SCRIPT = """
set -e
mount -o remount,bind,ro /
for folder in /tmp /var/tmp /run; do
    if mountpoint -q $folder; then mount -o remount,bind,ro $folder; fi
done
mount -t tmpfs -o size=$1,noexec,nosuid,nodev tmpfs /dev/shm
ulimit -n 64
cd /
keep=$2
shift 2
exec setpriv --reuid=54321 --regid=54321 --clear-groups --no-new-privs --inh-caps=-all$keep --ambient-caps=-all$keep \
    --bounding-set=-all$keep -- "$@"
"""


def container(shared_memory: str = "1m") -> list[str]:
    """A command to be put before another one: it ends up in a container, if this user may make one.

    shared_memory: the size of /dev/shm, the only folder that can be written; "0" leaves none.
    """
    clean = ["env", "-i", "PATH=/nonexistent", f"PYTHONPATH={Path(quire.__file__).parents[1]}", "OMP_NUM_THREADS=1"]
    if can_unshare():
        # An interpreter in root's own folder can be read with this capability only; it allows no writing.
        keep = "" if _others_can_enter(Path(sys.executable).resolve()) else ",+dac_read_search"
        unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _SCRIPT, "sh"]
        if shared_memory == "0":
            unshare[6] = unshare[6].replace("nodev", "nodev,ro")
            shared_memory = "1m"
        return [*unshare, shared_memory, keep, *clean]
    return ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *clean, "HOME=/nonexistent"]  # at least


@functools.cache
def can_unshare() -> bool:
    """Whether this process may make mount namespaces: root may, outside of most containers."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        return False
    tried = ["unshare", "--mount", "--propagation", "private", "mount", "-o", "remount,bind,ro", "/"]
    return subprocess.run(tried, capture_output=True).returncode == 0


def _others_can_enter(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in path.parents)
