"""SIGTERM ends a command in an orderly way, even if Python drops the exception that says so."""

from __future__ import annotations

import signal
from types import FrameType

_STATUS = 128 + signal.SIGTERM
_received: list[int] = []


def end_on_sigterm() -> None:
    """From now on, SIGTERM raises SystemExit in the main thread, which has to call this. Without a handler, Linux does
    not deliver the signal to the first process of a container."""
    signal.signal(signal.SIGTERM, _end)


def end_if_told() -> None:
    """Raises SystemExit if SIGTERM has come before. For servers that have just put handlers of their own in the place.

    Python prints and drops an exception that is raised during the callback of a weak reference. Each import runs such
    callbacks, so what `_end` raises can be dropped while a server starts.
    """
    if _received:
        raise SystemExit(_STATUS)


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise SystemExit(_STATUS)
