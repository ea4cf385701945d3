"""Profiles of machines that are not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.platform.machine_profile import MachineProfile
from quire.worker.machine_speed import KINDS, ROWS, thread_counts

MONDAY = 1_796_000_000.0  # seconds since 1970


def profile(
    threads: int = 2, best: int = 128, speedup: float = 1.0, call: float = 1e-6, **changes: Any
) -> MachineProfile:
    """A quiet machine. best: rows from which on products run at their full rate; half as many run at half of it.

    speedup: of each further thread, of reading and of products; 0 if it does not help. call: seconds of a call.
    """
    rates: dict[int, dict[int, float]] = {}
    for count in thread_counts(threads):
        factor = 1 + speedup * (count - 1)
        rows = ROWS if count == threads else (1, 512)
        rates[count] = {n: factor * 1e11 * min(1.0, n / best) for n in rows}
        rates[count][1] = factor * 1e10
    made = MachineProfile(
        dict.fromkeys(KINDS, rates),
        dict.fromkeys(rates, call),
        threads,
        noise=0.01,
        share=0.99,
        measured_at=MONDAY,
        compiled=True,
    )
    return replace(made, **changes)
