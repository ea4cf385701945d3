"""The options of the device and its kernels."""

from dataclasses import dataclass
from typing import Literal

from quire.options.declaration import option


@dataclass(frozen=True)
class KernelConfig:
    """Device and kernels."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str | None = None
    cpu_isa: Literal[
        "native", "amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2", "neon-bf16", "neon-dotprod", "neon"
    ] = "native"
    kernels: dict[str, str] = option({}, json=True)
    batch_invariant: bool = False
