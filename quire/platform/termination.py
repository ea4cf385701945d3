"""Ends processes cleanly on SIGTERM and SIGHUP, even if Python drops the exception, and quickly."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

_received: list[int] = []


def end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a server, which may then let its requests finish: SIGINT, SIGTERM and SIGHUP.

    SIGHUP comes when a terminal is closed. It is not handled if it is ignored, as under nohup.
    """
    ends = (signal.SIGINT, signal.SIGTERM)
    return ends if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*ends, signal.SIGHUP)


def leave_end_to_parent() -> None:
    """Ignore the signals that are often sent to a whole group of processes: the parent decides when this one ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_on_signals() -> None:
    """From now on, SIGTERM and SIGHUP raise SystemExit in the main thread. Must be called in the main thread. Without a
    handler, Linux does not deliver the signals to the first process of a container."""
    for number in end_signals():
        if number != signal.SIGINT:  # Python raises KeyboardInterrupt
            signal.signal(number, _end)


def end_if_told() -> None:
    """Raises SystemExit if such a signal has already arrived. For servers that have just installed their own handlers.

    Python prints and drops an exception that is raised during the callback of a weak reference. Each import runs such
    callbacks, so the exception of `_end` can be dropped while a server starts.
    """
    if _received:
        raise SystemExit(128 + _received[0])


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise SystemExit(128 + number)


def end_process(status: int) -> NoReturn:
    """End the process like sys.exit in its main thread, but without destroying all objects, which takes 0.2 to 0.3 s if
    torch was imported. Threads are joined, atexit functions are called, and the output is flushed."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # Python reports failed writes
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)
    sys.exit(status)
