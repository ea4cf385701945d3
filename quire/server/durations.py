"""Durations such as 5m, as clients and configuration files write them."""

import re

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"([-+]?)(?:({_PART})+|(\d+(?:\.\d*)?))")


def seconds_of(duration: float | str) -> float | None:
    """Return the seconds of a duration: a number, or a text such as 5m or 1h30m. A negative value means forever: None.

    Raises ValueError.
    """
    if not isinstance(duration, str):
        return None if duration < 0 else duration
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError("Input should be seconds, or a duration such as 5m or 1h30m; a negative one means forever")
    parts = re.findall(_PART, duration)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(match[5])
    return None if match[1] == "-" else seconds
