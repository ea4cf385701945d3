"""The options of the device and its kernels."""

from dataclasses import dataclass
from typing import Literal

from quire.config.declaration import ConfigError, at_least, option


@dataclass(frozen=True)
class KernelConfig:
    """Device and kernels."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str | None = None
    cpu_isa: Literal[
        "native", "amx", "avx512-bf16", "avx512-vnni", "avx512", "avx-vnni", "avx2", "neon-bf16", "neon-dotprod", "neon"
    ] = "native"
    threads: int | None = None
    kernels: dict[str, str] = option({}, json=True)
    batch_invariant: bool = False
    wait_for_kernels: bool = False
    cudagraph_capture_sizes: list[int] = option([])
    max_cudagraph_capture_size: int | None = None
    require_cuda_graphs: bool = False

    def __post_init__(self) -> None:
        at_least(self, 1, "max_cudagraph_capture_size", "threads")
        sizes = self.cudagraph_capture_sizes
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ConfigError(f"cudagraph_capture_sizes must be numbers of tokens of at least 1, got {sizes!r}")
