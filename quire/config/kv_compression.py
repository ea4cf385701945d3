"""The fields of the option kv_compression, and how many blocks a compressed text keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from quire.config.declaration import ConfigError

METHODS = "kv_compress", "adakv", "snapkv", "pyramidkv", "streaming_llm"


@dataclass(frozen=True)
class KVCompressionOptions:
    """method: which keys are kept, see docs/kv-compression.md. ratio: a prompt's cache shrinks to 1 / ratio of its
    size. window: so many of the prompt's last queries score its keys, and the keys of these tokens are always kept.
    sinks: so are those of the first tokens. kernel_size, pooling: the score of a key is the average ("avg") or the
    largest ("max") score of so many neighbours; 1 for its own. safeguard: of adakv and kv_compress, the share of the
    average budget that every head has. steepness: of pyramidkv, how much smaller than the average the last layer's
    budget is. interval: after so many more tokens, a request's cache is compressed again; 0 for never.
    """

    method: str = "kv_compress"
    ratio: float = 4.0
    window: int = 128
    sinks: int = 4
    kernel_size: int = 15
    pooling: str = "avg"
    safeguard: float = 0.2
    steepness: float = 20.0
    interval: int = 0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for a field that is unknown or wrong."""
        known = {field.name: field.type for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"kv_compression has no field {name!r}; it has {', '.join(known)}")
            kinds: tuple[type, ...] = (int, float) if known[name] is float else (known[name],)  # type: ignore[assignment]
            if type(value) not in kinds:
                raise ConfigError(f"kv_compression: {name} has the wrong type: {value!r}")
        options = cls(**given)
        for name, valid, rule in (
            ("method", options.method in METHODS, f"one of {', '.join(METHODS)}"),
            ("ratio", 1 <= options.ratio <= 1024, "a number from 1 to 1024"),
            ("window", options.window >= 1, "at least 1"),
            ("sinks", options.sinks >= 0, "at least 0"),
            ("kernel_size", options.kernel_size >= 1 and options.kernel_size % 2, "an odd number"),
            ("pooling", options.pooling in ("avg", "max"), "avg or max"),
            ("safeguard", 0 <= options.safeguard <= 1, "a number from 0 to 1"),
            ("steepness", 1 <= options.steepness <= 1024, "a number from 1 to 1024"),
            ("interval", options.interval in (0, max(options.interval, options.window)), "0 or at least the window"),
        ):
            if not valid:
                raise ConfigError(f"kv_compression: {name} must be {rule}, got {getattr(options, name)!r}")
        return options

    def fewest_blocks(self, num_tokens: int, block_size: int) -> int:
        """How many of a text's full blocks each head keeps at least: as many as its sinks and its window need."""
        return -(-(self.sinks + max(0, self.window - num_tokens % block_size)) // block_size)

    def kept_blocks(self, num_tokens: int, block_size: int, ratio: float | None = None) -> int | None:
        """How many full blocks a text of `num_tokens` keeps, besides the last one that is not full. None if it keeps
        all of them. ratio: the request's own."""
        full, tail = divmod(num_tokens, block_size)
        kept = int(num_tokens / (ratio or self.ratio) - tail) // block_size
        kept = max(kept, self.fewest_blocks(num_tokens, block_size))
        return kept if kept < full else None
