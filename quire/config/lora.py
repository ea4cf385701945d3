"""The options of low-rank adapters (LoRA)."""

from dataclasses import dataclass

from quire.config.declaration import ConfigError, at_least, option


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters (LoRA)."""

    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_target_modules: list[str] = option([])

    def __post_init__(self) -> None:
        at_least(self, 1, "max_loras", "max_lora_rank", "max_cpu_loras")
        if self.num_in_memory < self.max_loras:
            raise ConfigError(f"max_cpu_loras must be at least max_loras ({self.max_loras}), got {self.max_cpu_loras}")

    @property
    def num_in_memory(self) -> int:
        """The number of adapters that are kept in CPU memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
