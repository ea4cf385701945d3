"""The options of the KV cache."""

from dataclasses import dataclass
from typing import Any, Literal

from quire.config.declaration import ConfigError, at_least, option
from quire.config.kv_compression import KVCompressionOptions
from quire.config.kv_events import KVEventOptions
from quire.config.kv_transfer import KVTransferOptions


@dataclass(frozen=True)
class CacheConfig:
    """KV cache."""

    block_size: int = 16
    mamba_block_size: int | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "int8", "fp8"] = "auto"
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = option(None, size=True)
    gpu_memory_utilization: float = option(0.9, flags=("--device-memory-utilization",))
    num_gpu_blocks_override: int | None = None
    kv_cache_pretouch: bool = False
    kv_cache_layout: Literal["layers_together", "layer_by_layer"] = "layers_together"
    pinned_prefix_share: float = 0.25
    kv_events_config: dict[str, Any] = option({}, json=True)
    kv_transfer_config: dict[str, Any] = option({}, json=True)
    insecure_transfers: bool = False
    kv_compression: dict[str, Any] = option({}, json=True)
    kv_offloading_size: float | None = None
    kv_offloading_path: str | None = None
    kv_offloading_disk_size: int | None = option(None, size=True)

    def __post_init__(self) -> None:
        if not 0 <= self.pinned_prefix_share <= 1:
            raise ConfigError(f"pinned_prefix_share must be from 0 to 1, got {self.pinned_prefix_share!r}")
        _ = self.events, self.transfer, self.compression  # raise ConfigError
        at_least(self, 1, "block_size", "mamba_block_size", "kv_cache_memory_bytes", "kv_offloading_disk_size")
        if self.kv_offloading_size is not None and not 0 <= self.kv_offloading_size < 2**20:
            raise ConfigError(f"kv_offloading_size is a number of GiB, got {self.kv_offloading_size!r}")
        if self.kv_offloading_disk_size is not None and self.kv_offloading_path is None:
            raise ConfigError("kv_offloading_disk_size bounds the folder of kv_offloading_path; give that, too")
        at_least(self, 2, "num_gpu_blocks_override")
        if not 0 < self.gpu_memory_utilization <= 1:
            message = f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}"
            raise ConfigError(message)

    @property
    def events(self) -> KVEventOptions | None:
        return KVEventOptions.read(self.kv_events_config)

    @property
    def transfer(self) -> KVTransferOptions | None:
        if not self.kv_transfer_config:
            return None
        options = KVTransferOptions.read(self.kv_transfer_config)
        return options.within_private_networks() if self.insecure_transfers else options

    @property
    def compression(self) -> KVCompressionOptions | None:
        return KVCompressionOptions.read(self.kv_compression) if self.kv_compression else None

    @property
    def has_tiers(self) -> bool:
        """Whether evicted blocks are kept outside the pool."""
        return bool(self.kv_offloading_size) or self.kv_offloading_path is not None

    @property
    def kv_offloading_bytes(self) -> int:
        """The CPU memory for a replica's blocks."""
        return int((self.kv_offloading_size or 0) * 2**30)
