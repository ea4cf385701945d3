"""Shows the stacks of a process's threads, even if it hangs while holding the interpreter's lock, or is stopped. Each
participating process has a file in a common folder, and writes to it on a signal.
"""

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import TextIO

FOLDER_VARIABLE = "QUIRE_STACKS_FOLDER"  # where the ranks of a core have their files
_SIGNAL = signal.SIGUSR1  # torch's profiler may take SIGUSR2
_PREFIX = "stacks-"
_WAIT_SECONDS = 1.0  # a process that cannot run for this long shows nothing
_SETTLED_SECONDS = 0.05  # a file that has not grown for this long is complete
_open_files: list[TextIO] = []  # faulthandler needs them open


def offer_stacks(folder: Path, name: str) -> None:
    """Let this process write its stacks to the folder on request of `collect_stacks`."""
    file = (folder / f"{_PREFIX}{os.getpid()}-{name}").open("w")
    _open_files.append(file)
    faulthandler.register(_SIGNAL, file, all_threads=True)


def collect_stacks(folder: Path, only: int | None = None) -> dict[str, str]:
    """Return the stacks of the processes with files in the folder, by name, or of the one with this process id. Takes
    at most a second. It resumes processes that were stopped by SIGSTOP, so kill them afterwards. Stacks of earlier
    calls are included again.
    """
    files = {int(path.name.split("-")[1]): path for path in folder.glob(f"{_PREFIX}*")}
    if only is not None:
        files = {pid: path for pid, path in files.items() if pid == only}
    waiting: dict[int, int] = {}  # process id -> size of its file
    for pid, path in files.items():
        with contextlib.suppress(OSError):
            waiting[pid] = path.stat().st_size
            os.kill(pid, _SIGNAL)
            os.kill(pid, signal.SIGCONT)
    before = dict(waiting)
    end = time.monotonic() + _WAIT_SECONDS
    while waiting and time.monotonic() < end:
        time.sleep(_SETTLED_SECONDS)
        for pid, size in list(waiting.items()):
            now = files[pid].stat().st_size
            if now == size > before[pid]:
                del waiting[pid]
            else:
                waiting[pid] = now
    texts = {files[pid].name.split("-")[2]: files[pid].read_text(errors="replace").strip() for pid in before}
    return {name: text for name, text in texts.items() if text}
