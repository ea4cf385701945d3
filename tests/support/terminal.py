"""Commands in a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from support.waiting import LONGEST, eventually

CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class Session:
    """A process whose standard streams are a terminal. `screen` is everything that it has written."""

    def __init__(self, command: list[str], columns: int, rows: int, environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", **environment},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # makes Ctrl-C a signal
        )
        os.close(slave)
        self.screen, self._seen = "", 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C when the process waits for a key, as a person does.

        A signal in the microseconds between the echo of a key and the wait for the next key would be noticed by
        Python's readline only at the next key.
        """
        eventually(lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_SLEEPING, "the wait for a key")
        self.type(CTRL_C)

    def wait_for(self, text: str, timeout: float = LONGEST) -> str:
        """Wait for `text`. Returns the output since the last call, up to and including `text`."""
        deadline = time.monotonic() + timeout
        while (found := self.screen.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.screen[self._seen :]!r}"
            assert self._read(), f"it ended without {text!r}: {self.screen[self._seen :]!r}"
        written = self.screen[self._seen : found + len(text)]
        self._seen = found + len(text)
        return written

    def end(self, timeout: float = LONGEST) -> int:
        """Wait for the process to end. Returns its exit status."""
        deadline = time.monotonic() + timeout
        while self._read():
            assert time.monotonic() < deadline, f"it goes on: {self.screen[self._seen :]!r}"
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        """Read output. Returns False once no process has the terminal open."""
        if not select.select([self._master], [], [], 0.2)[0]:
            return True
        try:
            piece = os.read(self._master, 65536)
        except OSError:
            return False
        self.screen += piece.decode(errors="replace").replace("\r\n", "\n")
        return bool(piece)


@contextlib.contextmanager
def terminal(*arguments: str, state: Path, columns: int = 70, rows: int = 40, **environment: str) -> Iterator[Session]:
    """Run `quire ...` in a terminal. state: the folder in which it keeps the user's state."""
    with _session(["-m", "quire", *arguments], state, columns, rows, environment) as session:
        yield session


@contextlib.contextmanager
def script(code: str, state: Path, columns: int = 70, **environment: str) -> Iterator[Session]:
    """Run Python code in a terminal."""
    with _session(["-c", code], state, columns, 40, environment) as session:
        yield session


@contextlib.contextmanager
def _session(
    arguments: list[str], state: Path, columns: int, rows: int, environment: dict[str, str]
) -> Iterator[Session]:
    session = Session([sys.executable, *arguments], columns, rows, {"XDG_STATE_HOME": str(state), **environment})
    try:
        yield session
    finally:
        session.close()
