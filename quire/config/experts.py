"""The options of --eplb-config: how experts are moved between ranks."""

from dataclasses import dataclass, fields
from typing import Any, Self

from quire.config.declaration import ConfigError, at_least
from quire.messages.errors import error_text


@dataclass(frozen=True)
class BalanceOptions:
    """vLLM's names. step_interval: after so many steps, experts move. window_size: their loads in so many of the last
    steps count. num_redundant_experts: how many experts of a layer have a second copy. log_balancedness: write to the
    log how equal the loads are. The other fields have no effect: experts move between steps, by the collectives of the
    ranks.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    use_async: bool = False
    policy: str = "default"
    communicator: str | None = None
    enable_migration_batching: bool = False

    def __post_init__(self) -> None:
        at_least(self, 1, "window_size", "step_interval")
        at_least(self, 0, "num_redundant_experts")
        if self.window_size > self.step_interval:
            raise ConfigError(
                f"eplb_config: window_size must be at most step_interval ({self.step_interval}), got {self.window_size}"
            )

    @classmethod
    def read(cls, given: dict[str, Any]) -> Self:
        """Raises ConfigError for unknown fields and wrong values."""
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise ConfigError(f"eplb_config has no field {name!r}; it has {', '.join(names)}")
        try:
            return cls(**given)
        except ConfigError as error:
            text = error_text(error)
            raise ConfigError(text if text.startswith("eplb_config") else f"eplb_config: {text}") from None
