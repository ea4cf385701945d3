"""Service level objectives: `ttft=500ms,itl=50ms,e2e=10s`."""

import re
from dataclasses import dataclass

METRICS = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end-to-end latency",
}
PERCENTILE = 99.0
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LIMIT = re.compile(
    r"(?:p(?P<percentile>\d+(?:\.\d+)?):)?(?P<metric>\w+)\s*=\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>us|ms|s)"
)


@dataclass(frozen=True)
class Limit:
    """An upper limit in seconds for a percentile of a metric."""

    metric: str
    seconds: float
    percentile: float = PERCENTILE

    def __str__(self) -> str:
        value = f"{self.seconds:g} s" if self.seconds >= 1 else f"{self.seconds * 1e3:g} ms"
        return f"p{self.percentile:g} {self.metric.upper()} ≤ {value}"


def parse(text: str) -> list[Limit]:
    """ "ttft=500ms,p95:itl=50ms" -> a Limit for each. The default percentile is 99. Raises ValueError."""
    limits = []
    for part in text.split(","):
        match = _LIMIT.fullmatch(part.strip().lower())
        if match is None or match["metric"] not in METRICS:
            raise ValueError(
                f"slo={text!r}: {part.strip()!r} must be a metric and a time, such as ttft=500ms or "
                f"p95:itl=50ms; metrics are {', '.join(METRICS)}, units ms and s"
            )
        percentile = float(match["percentile"] or PERCENTILE)
        seconds = float(match["value"]) * _UNITS[match["unit"]]
        if not 0 < percentile <= 100 or seconds <= 0:
            raise ValueError(f"slo={text!r}: {part.strip()!r} needs a percentile of at most 100, and a time above 0")
        limits.append(Limit(match["metric"], seconds, percentile))
    if len({(limit.metric, limit.percentile) for limit in limits}) < len(limits):
        raise ValueError(f"slo={text!r} limits something twice")
    return limits
