"""The fields of the option kv_compression, and the number of blocks of a compressed text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from quire.config.declaration import AtLeast0, AtLeast1, ConfigError, read_object


@dataclass(frozen=True)
class KVCompressionOptions:
    """method: which keys are kept, see docs/kv-compression.md. ratio: a prompt's cache shrinks to 1 / ratio of its
    size. window: the number of the prompt's last queries that score its keys; the keys of these tokens are always kept.
    sinks: the number of first tokens whose keys are always kept. kernel_size, pooling: the score of a key is the
    average ("avg") or the maximum ("max") over this many neighbours; 1 for its own score. safeguard: for adakv and
    kv_compress, the share of the average budget guaranteed to every head. steepness: for pyramidkv, how much smaller
    than the average the last layer's budget is. interval: the number of further tokens after which a request's cache is
    compressed again; 0 for never.
    """

    method: Literal["kv_compress", "adakv", "snapkv", "pyramidkv", "streaming_llm"] = "kv_compress"
    ratio: Annotated[float, Meta(ge=1, le=1024)] = 4.0
    window: AtLeast1 = 128
    sinks: AtLeast0 = 4
    kernel_size: AtLeast1 = 15
    pooling: Literal["avg", "max"] = "avg"
    safeguard: Annotated[float, Meta(ge=0, le=1)] = 0.2
    steepness: Annotated[float, Meta(ge=1, le=1024)] = 20.0
    interval: int = 0

    def __post_init__(self) -> None:
        if self.kernel_size % 2 == 0:
            raise ConfigError(f"kernel_size must be an odd number, got {self.kernel_size}")
        if self.interval and self.interval < self.window:
            raise ConfigError(f"interval must be 0 or at least the window, got {self.interval}")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for an unknown or invalid field."""
        return read_object("kv_compression", given, cls)

    def fewest_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the minimum number of full blocks that each head keeps: those for its sinks and its window."""
        return -(-(self.sinks + max(0, self.window - num_tokens % block_size)) // block_size)

    def kept_blocks(self, num_tokens: int, block_size: int, ratio: float | None = None) -> int | None:
        """Return how many full blocks a text of `num_tokens` keeps, in addition to the last, partial one. None if it
        keeps all of them. ratio: of the request."""
        full, tail = divmod(num_tokens, block_size)
        kept = int(num_tokens / (ratio or self.ratio) - tail) // block_size
        kept = max(kept, self.fewest_blocks(num_tokens, block_size))
        return kept if kept < full else None
