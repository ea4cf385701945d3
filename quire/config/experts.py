"""How ranks exchange the tokens of experts, and the options of --eplb-config: how experts are moved between ranks."""

from dataclasses import dataclass
from typing import Literal

from quire.config.declaration import AtLeast0, AtLeast1, ConfigError

All2All = Literal[
    "all_to_all", "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "symmetric_memory"
]
# Those whose sizes do not depend on the experts that tokens choose, so that CUDA graphs can contain them.
FIXED: tuple[All2All, ...] = ("allgather_reducescatter", "deepep_low_latency", "symmetric_memory")
DEEP_EP: tuple[All2All, ...] = ("deepep_high_throughput", "deepep_low_latency")


@dataclass(frozen=True)
class BalanceOptions:
    """vLLM's names. step_interval: the number of steps after which experts are rebalanced. window_size: the number of
    recent steps over which loads are measured. num_redundant_experts: how many experts per layer have a second copy.
    log_balancedness: log how balanced the loads are. The other fields have no effect: experts always move while steps
    run, using the ranks' collectives.
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
