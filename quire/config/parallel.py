"""The options of ranks and replicas."""

from dataclasses import dataclass
from typing import Any, Literal

from quire.config.declaration import ConfigError, at_least, option, read_object
from quire.config.experts import All2All, BalanceOptions


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism."""

    tensor_parallel_size: int = option(1, flags=("-tp",))
    decode_context_parallel_size: int = option(1, flags=("-dcp",))
    prefill_context_parallel_size: int = option(1, flags=("-pcp",))
    pipeline_parallel_size: int = option(1, flags=("-pp",))
    pipeline_layers: list[int] = option([])
    enable_sequence_parallel: bool = False
    disable_custom_all_reduce: bool = False
    data_parallel_size: int = option(1, flags=("-dp",))
    data_parallel_routing: Literal["load", "prefix"] = "load"
    enable_expert_parallel: bool = option(False, flags=("-ep",))
    all2all_backend: Literal["auto", All2All] = "auto"
    enable_eplb: bool = False
    eplb_config: dict[str, Any] = option({}, json=True)
    enable_dbo: bool = False
    dbo_decode_token_threshold: int = 32
    dbo_prefill_token_threshold: int = 512

    def __post_init__(self) -> None:
        at_least(self, 1, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        at_least(self, 1, "decode_context_parallel_size", "prefill_context_parallel_size")
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} must divide "
                f"tensor_parallel_size={self.tensor_parallel_size}, whose ranks it divides"
            )
        at_least(self, 1, "dbo_decode_token_threshold", "dbo_prefill_token_threshold")
        _ = self.balance  # raises ConfigError
        if self.pipeline_layers and len(self.pipeline_layers) != self.pipeline_parallel_size:
            raise ConfigError(
                "pipeline_layers must have a number for each of the pipeline_parallel_size="
                f"{self.pipeline_parallel_size} stages, got {self.pipeline_layers}"
            )

    @property
    def ranks(self) -> int:
        """The number of ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def balance(self) -> BalanceOptions:
        return read_object("eplb_config", self.eplb_config, BalanceOptions)

    @property
    def shares_experts(self) -> bool:
        """Whether the replicas share experts, and therefore run their steps in lockstep."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    def exchange(self, in_graphs: bool) -> All2All:
        """Return how ranks with different tokens exchange them. in_graphs: whether CUDA graphs can contain what ranks
        exchange. They need a fixed capacity; without it, results do not depend on the placement of experts."""
        if self.all2all_backend != "auto":
            return self.all2all_backend
        return "allgather_reducescatter" if in_graphs else "all_to_all"

    @property
    def exchanges_tokens(self) -> bool:
        """Whether ranks with different tokens share experts, and therefore exchange tokens."""
        return self.enable_expert_parallel and self.data_parallel_size * self.prefill_context_parallel_size > 1
