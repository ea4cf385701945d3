"""The options of packed weights on disk."""

from dataclasses import dataclass

from quire.config.declaration import at_least, option


@dataclass(frozen=True)
class WeightsConfig:
    """Weights on disk."""

    weight_cache: bool = True
    weight_cache_size: int = option(32 << 30, size=True)

    def __post_init__(self) -> None:
        at_least(self, 1, "weight_cache_size")
