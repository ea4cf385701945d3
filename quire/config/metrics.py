"""The options of the engine's metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.declaration import ConfigError, option

# vLLM's names of groups of histograms; observability/engine.toml assigns histograms to them.
FAMILIES = (
    "request_latency",
    "time_to_first_token",
    "inter_token_latency",
    "iteration_tokens",
    "request_params_n",
    "request_num_preemptions",
    "request_tokens",
)


@dataclass(frozen=True)
class MetricsConfig:
    """Log and metrics."""

    custom_histogram_buckets: dict[str, Any] = option({}, json=True)

    def __post_init__(self) -> None:
        for family, bounds in self.custom_histogram_buckets.items():
            if family not in FAMILIES:
                raise ConfigError(f"custom_histogram_buckets has no family {family!r}; it has {', '.join(FAMILIES)}")
            if not _are_bounds(bounds):
                raise ConfigError(
                    f"custom_histogram_buckets: {family} must be a list of ascending numbers above 0, got {bounds!r}"
                )

    @property
    def buckets(self) -> Mapping[str, list[float]]:
        return self.custom_histogram_buckets


def _are_bounds(values: Any) -> bool:
    if not isinstance(values, list | tuple) or not values:
        return False
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return numbers and values[0] > 0 and values[-1] < float("inf") and list(values) == sorted(set(values))
