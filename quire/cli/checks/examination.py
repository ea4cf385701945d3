"""Runs checks in a separate process, one after the other, so that no check can crash the command.

A check may load libraries that crash, and query drivers and file systems that never respond. Its process is then
abandoned, which is reported as the check's finding, and a new process continues with the next check.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, NoReturn

from quire.cli.checks.finding import Check, Finding, Level, note, problem
from quire.messages.errors import error_text

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SECONDS = 30.0  # that one check may take until it is given up
_TIDY_SECONDS = 1.0  # to wait for the end of a process that was killed: one that waits for a disk may never end
_LOOK_THERE = "Something that the check uses is broken or does not answer: a library, a driver or a file system."


def examine(checks: Mapping[str, Check], seconds: float = SECONDS) -> Generator[tuple[str, Finding]]:
    """Run the checks in order. Yields each finding with the name of its check, as soon as it is available.

    seconds: the time limit of one check.
    """
    waiting = list(checks)
    while waiting:
        try:
            process = _Process({name: checks[name] for name in waiting})
        except OSError as error:
            found = f"no process can be started, so the remaining checks are left out: {error_text(error)}"
            yield waiting[0], problem(found, "Raise the limits of processes and memory (ulimit -u, ulimit -v).")
            return
        with contextlib.closing(process):
            try:
                while waiting:
                    deadline = time.monotonic() + seconds
                    while (finding := process.next_finding(deadline)) is not None:
                        yield waiting[0], finding
                    del waiting[0]
            except _LostError as error:
                yield waiting.pop(0), problem(f"the check failed: {error_text(error)}", _LOOK_THERE)


class _LostError(RuntimeError):
    """The process has exited, or does not respond. The text says which."""


class _Process:
    """A child of this process, which runs the checks and sends their findings.

    It is forked, so a check may be any function. That is safe, since this process has no other threads.
    """

    def __init__(self, checks: Mapping[str, Check]) -> None:
        from multiprocessing import Pipe

        self._status: int | None = None
        self._received, sent = Pipe(duplex=False)
        with sent:
            self._written = _scratch_file()
            sys.stdout.flush()
            try:
                self._pid = os.fork()
            except OSError:
                self._release()
                raise
            if self._pid == 0:
                _run(checks, sent, self._written)
        with contextlib.suppress(OSError):  # the child does the same: whoever is first
            os.setpgid(self._pid, self._pid)

    def next_finding(self, deadline: float) -> Finding | None:
        """Return the next finding of the current check, or None at its end. Raises _LostError."""
        if not self._received.poll(max(0.0, deadline - time.monotonic())):
            raise _LostError("it did not end in time")
        try:
            message = json.loads(self._received.recv_bytes())
        except (EOFError, OSError):
            raise _LostError(self._last_words()) from None
        if message is None:
            return None
        level, found, advice = message
        return Finding(Level(level), found, advice)

    def _last_words(self) -> str:
        self._wait()
        code = 0 if self._status is None else os.waitstatus_to_exitcode(self._status)
        reason = f"its process ended with status {code}"
        if code < 0:
            with contextlib.suppress(ValueError):  # a real-time signal has no name
                reason = f"its process was ended by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            reason += ", probably since memory ran out"
        size = os.lseek(self._written, 0, os.SEEK_END)
        lines = os.pread(self._written, 2000, max(0, size - 2000)).decode(errors="replace").splitlines()
        return ": ".join([reason, *[line.strip() for line in lines if line.strip()][-1:]])

    def _wait(self) -> None:
        deadline = time.monotonic() + _TIDY_SECONDS
        while self._status is None and time.monotonic() < deadline:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored, a setting inherited from the parent
                pid = self._pid
                status = 0
            if pid:
                self._status = status
            else:
                time.sleep(0.005)

    def close(self) -> None:
        """Terminate the process and its children."""
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        self._wait()
        self._release()

    def _release(self) -> None:
        self._received.close()
        os.close(self._written)


def _scratch_file() -> int:
    """Return a file for the output of the checks' libraries to standard output and standard error."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            return os.memfd_create("quire-doctor")
    return os.open(os.devnull, os.O_RDWR)


def _run(checks: Mapping[str, Check], sent: "Connection", written: int) -> NoReturn:
    """Run the checks, in the child process. An exception is a finding, too."""
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # what a check has started, such as a compiler, is ended with this process
        for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), written, written)):
            os.dup2(source, target)
        for check in checks.values():
            try:
                for finding in check():
                    _send(sent, finding)
            except Exception as error:
                _send(sent, note(f"could not be found out: {error_text(error)}", ""))
            _send(sent, None)
    finally:
        os._exit(0)


def _send(sent: "Connection", finding: Finding | None) -> None:
    sent.send_bytes(json.dumps(finding).encode())
