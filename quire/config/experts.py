"""The options of --eplb-config: how experts are moved between ranks."""

from dataclasses import dataclass

from quire.config.declaration import AtLeast0, AtLeast1, ConfigError


@dataclass(frozen=True)
class BalanceOptions:
    """vLLM's names. step_interval: the number of steps after which experts are rebalanced. window_size: the number of
    recent steps over which loads are measured. num_redundant_experts: how many experts per layer have a second copy.
    log_balancedness: log how balanced the loads are. The other fields have no effect: experts move between steps, using
    the ranks' collectives.
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
