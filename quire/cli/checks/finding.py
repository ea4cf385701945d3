"""The result of a check of `quire doctor`."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    """ok: no problem. note: worth knowing, but Quire works. problem: Quire fails, or is much slower."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """found: the current state. advice: what to do about it, empty if nothing needs to be done."""

    level: Level
    found: str
    advice: str = ""


Check = Callable[[], Iterable[Finding]]  # it may import what takes long, may raise any exception, and may even crash


def ok(found: str) -> Finding:
    return Finding(Level.OK, found)


def note(found: str, advice: str) -> Finding:
    return Finding(Level.NOTE, found, advice)


def problem(found: str, advice: str) -> Finding:
    return Finding(Level.PROBLEM, found, advice)


def memory_text(size: float) -> str:
    """Format a number of bytes of memory, in the binary units that systems use."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
