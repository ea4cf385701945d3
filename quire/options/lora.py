"""The options of low-rank adapters (LoRA)."""

from dataclasses import dataclass

from quire.options.declaration import ConfigError, at_least, option


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters (LoRA)."""

    enable_lora: bool = option(False, "let requests use low-rank adapters; see docs/lora.md")
    max_loras: int = option(1, "maximum number of adapters in a batch; their matrices are beside the model's weights")
    max_lora_rank: int = option(16, "maximum rank of an adapter; memory for adapters of this rank is reserved")
    max_cpu_loras: int | None = option(
        None, "maximum number of adapters that are kept in CPU memory, at least max_loras (default: max_loras)"
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "max_loras", "max_lora_rank", "max_cpu_loras")
        if self.num_in_memory < self.max_loras:
            raise ConfigError(f"max_cpu_loras must be at least max_loras ({self.max_loras}), got {self.max_cpu_loras}")

    @property
    def num_in_memory(self) -> int:
        """The number of adapters that are kept in CPU memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
