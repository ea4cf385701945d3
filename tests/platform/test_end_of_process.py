"""A command's process ends quickly, and leaves nothing undone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from quire.platform.termination import end_process

class Object:
    def __del__(self):
        print("destroyed")

lasting = Object()
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.1), print("pool")))
print("end", end=" ")
end_process(3)
"""


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
UNWRITABLE = "from quire.platform.termination import end_process\nprint('text')\nend_process(0)"


def run(program: str, output: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, text=True, stdout=output, stderr=subprocess.PIPE, env=BUFFERED)


def test_threads_are_joined_and_output_is_flushed_before_the_process_ends() -> None:
    done = run(PROGRAM, subprocess.PIPE)
    assert done.returncode == 3
    assert done.stdout.split() == ["end", "pool", "thread", "atexit"]
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_output_that_cannot_be_written_is_reported() -> None:
    with open("/dev/full", "w") as full:
        done = run(UNWRITABLE, full.fileno())
    assert done.returncode == 120
    assert "No space left" in done.stderr
