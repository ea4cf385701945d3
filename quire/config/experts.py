"""The options of --eplb-config: how experts are moved between ranks."""

from dataclasses import dataclass

from quire.config.declaration import AtLeast0, AtLeast1, ConfigError


@dataclass(frozen=True)
class BalanceOptions:
    """vLLM's names. step_interval: after so many steps, experts move. window_size: their loads in so many of the last
    steps count. num_redundant_experts: how many experts of a layer have a second copy. log_balancedness: write to the
    log how equal the loads are. The other fields have no effect: experts move between steps, by the collectives of the
    ranks.
    """

    window_size: AtLeast1 = 1000
    step_interval: AtLeast1 = 3000
    num_redundant_experts: AtLeast0 = 0
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    use_async: bool = False
    policy: str = "default"
    communicator: str | None = None
    enable_migration_batching: bool = False

    def __post_init__(self) -> None:
        if self.window_size > self.step_interval:
            raise ConfigError(
                f"window_size must be at most step_interval ({self.step_interval}), got {self.window_size}"
            )
