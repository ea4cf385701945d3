"""The options of the scheduler."""

from dataclasses import dataclass
from typing import Any, Literal

from quire.config.declaration import ConfigError, at_least, check_seconds, option
from quire.config.speculative import SpeculativeOptions

_MAX_NUM_SEQS = 256


@dataclass(frozen=True)
class SchedulerConfig:
    """Scheduling."""

    max_num_seqs: int = option(None)
    max_num_active_seqs: int | None = None
    max_num_batched_tokens: int | None = option(None, size=True)
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = option(0, size=True)
    long_prefill_token_threshold_adaptive: bool = False
    max_itl: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool | None = None
    speculative_config: dict[str, Any] = option({}, json=True, flags=("-sc",))
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    stream_interval: int = 1
    watchdog_timeout: float | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens", "max_itl", "stream_interval")
        at_least(self, 0, "long_prefill_token_threshold")
        _ = self.speculation  # raises ConfigError
        check_seconds("watchdog_timeout", self.watchdog_timeout, zero=True)
        if self.max_num_seqs is None:
            max_num_seqs = min(_MAX_NUM_SEQS, self.max_num_batched_tokens or _MAX_NUM_SEQS)
            object.__setattr__(self, "max_num_seqs", max_num_seqs)
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            raise ConfigError(
                f"max_num_active_seqs must be at most max_num_seqs ({self.max_num_seqs}), got "
                f"{self.max_num_active_seqs}"
            )

    @property
    def speculation(self) -> SpeculativeOptions | None:
        return SpeculativeOptions.read(self.speculative_config) if self.speculative_config else None

    def tokens_of_a_step(self, gpu: bool) -> int:
        """Return the maximum number of tokens per step, with the device's default if the option is not given."""
        return self.max_num_batched_tokens or max(8192 if gpu else 512, self.max_num_seqs)
