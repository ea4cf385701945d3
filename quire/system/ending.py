"""SIGTERM ends a command in an orderly way, even if Python drops the exception that says so."""

from __future__ import annotations

import signal
from types import FrameType

_STATUS = 128 + signal.SIGTERM
_received: list[int] = []


def end_on_sigterm() -> None:
    """From now on, SIGTERM ends this process, which must be in its main thread, as an exception would. Without a
    handler, Linux keeps the signal from the first process of a container."""
    signal.signal(signal.SIGTERM, _end)


def end_if_told() -> None:
    """Raises SystemExit if SIGTERM has come. Python drops an exception that a handler raises during a weak reference's
    callback, of which each import has some: a server that is about to take over the handling of signals asks here."""
    if _received:
        raise SystemExit(_STATUS)


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise SystemExit(_STATUS)
