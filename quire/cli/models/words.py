"""Sizes, numbers and times in human-readable form."""

import time


def size_text(num_bytes: float) -> str:
    """1_503_300_328 -> "1.5 GB". Units are decimal, as on the hub and on disks."""
    return _scaled(num_bytes, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}) or f"{num_bytes:.0f} bytes"


def count_text(number: int) -> str:
    """596_049_920 -> "596 million"."""
    return _scaled(number, {"billion": 1e9, "million": 1e6}) or f"{number:,}"


def _scaled(number: float, units: dict[str, float]) -> str | None:
    for unit, factor in units.items():
        if number >= 0.9995 * factor:  # what is rounded to the next unit is shown in that unit
            scaled = number / factor
            return f"{scaled:.1f} {unit}" if scaled < 9.95 else f"{scaled:.0f} {unit}"
    return None


def age_text(timestamp: float) -> str:
    """The age of a time given in seconds since 1970: "3 days ago"."""
    seconds = max(0.0, time.time() - timestamp)
    for unit, length in (("year", 31_557_600), ("month", 2_629_800), ("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            number = int(seconds // length)
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"


def speed_text(tokens_per_second: float) -> str:
    """Two digits, since it is an estimate: 23.7 -> "24", 1_834 -> "1,800", 0.53 -> "0.53"."""
    rounded = float(f"{tokens_per_second:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
