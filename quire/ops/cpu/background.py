"""Compiles kernels in a low-priority process, which outlives the process that started it."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from quire.ops.cpu import compiling

# The niceness while an engine waits for the kernels. With 10, an engine that is busy on all cores would leave it a
# tenth of the time; with 5, a quarter.
NICE = 5


class Background:
    """Compiles the units that engines need, then all others.

    problem: the reason why they could not be compiled, "" without one.
    """

    def __init__(
        self, first: Sequence[compiling.Job], then: Sequence[compiling.Job], at_once: int, ended: Callable[[], None]
    ) -> None:
        """ended: called once, on another thread. Raises OSError if no process can be started."""
        self.problem, self._ended = "", threading.Event()
        self._began = time.monotonic()
        self._wake = [ended]
        order = {"first": first, "then": then, "at_once": at_once, "nice": NICE}
        # Neither the signals of a terminal nor the end of this process reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", compiling.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            cwd="/",
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order, default=str))
        self._process.stdin.close()
        threading.Thread(target=self._wait, name="quire-kernels", daemon=True).start()

    def connect(self, wake: Callable[[], None]) -> None:
        """wake: called from another thread when this has ended."""
        self._wake.append(wake)
        if self.has_ended:
            wake()

    @property
    def has_ended(self) -> bool:
        """Whether the units that engines need are available, or cannot be compiled."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until `has_ended` is true."""
        self._ended.wait()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._began

    def _wait(self) -> None:
        assert self._process.stdout is not None
        try:
            self.problem = json.loads(self._process.stdout.readline())
        except ValueError:
            self.problem = f"the process that compiles ended with status {self._process.wait()}"
        self._ended.set()
        for wake in self._wake:
            wake()
        self._process.stdout.close()
        self._process.wait()
