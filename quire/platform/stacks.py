"""Shows where the threads of a process are, also if it hangs with the interpreter's lock held or is stopped.

Each process that takes part has a file in a common folder. A signal makes it write there.
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
_WAIT_SECONDS = 1.0  # a process that cannot run for so long shows nothing
_SETTLED_SECONDS = 0.05  # a file that has not grown for so long is complete
_open_files: list[TextIO] = []  # faulthandler needs them open


def offer_stacks(folder: Path, name: str) -> None:
    """Have this process write its stacks into the folder when `collect_stacks` asks for them."""
    file = (folder / f"{_PREFIX}{os.getpid()}-{name}").open("w")
    _open_files.append(file)
    faulthandler.register(_SIGNAL, file, all_threads=True)


def collect_stacks(folder: Path, only: int | None = None) -> dict[str, str]:
    """The stacks of the processes with files in the folder, by name, or of one with this process id. Takes a second at
    most.

    It lets processes go on that SIGSTOP has stopped, so kill them afterwards. Stacks of earlier calls come again.
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
