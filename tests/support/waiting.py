"""Waits for conditions, on a machine of any speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LONGEST = 1200.0  # seconds; only what hangs takes longer, even on a machine with ten times as much to do as it can


def eventually(condition: Callable[[], T], what: object = "") -> T:
    """Wait until the condition holds. Returns its value. what: is awaited; an error shows it, or what it returns."""
    end = time.monotonic() + LONGEST
    while not (value := condition()):
        assert time.monotonic() < end, _problem(what)
        time.sleep(0.01)
    return value


async def eventually_async(condition: Callable[[], T], what: object = "") -> T:
    """The same within an event loop, which goes on in the meantime."""
    end = time.monotonic() + LONGEST
    while not (value := condition()):
        assert time.monotonic() < end, _problem(what)
        await asyncio.sleep(0.01)
    return value


def _problem(what: object) -> str:
    shown = what() if callable(what) else what
    return f"it did not come: {shown}" if shown else "it did not come"
