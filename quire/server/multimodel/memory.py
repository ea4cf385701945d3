"""The memory that models need, and the budget that they share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from quire.config.engine import EngineConfig

GIB = 1 << 30


@dataclass(frozen=True)
class Need:
    """The bytes that a model needs.

    weights: of its weights. process: of everything else in its processes, except for the KV cache. least_cache,
    most_cache: bounds of a useful KV cache. whole_cache: of a request of the longest length. is_fixed: whether options
    set the size of the KV cache, or the engine chooses it itself (on a GPU).
    """

    weights: int
    process: int = 0
    least_cache: int = 0
    most_cache: int = 0
    whole_cache: int = 0
    is_fixed: bool = False

    @property
    def base(self) -> int:
        return self.weights + self.process

    @property
    def least(self) -> int:
        return self.base + self.least_cache

    def measured(self, used: int) -> Self:
        """Return the need as measured. used: bytes of the processes after loading; weights that are mapped from files
        may not be among them yet."""
        return replace(self, process=max(used - self.weights, 0))

    def cache_in(self, available: int) -> int:
        """Return the size of the KV cache if the model gets this much memory, at least `least`: half of what its
        weights leave, so that other models also have room."""
        return max(self.least_cache, min(self.most_cache, (available - self.base) // 2))

    def given(self, config: EngineConfig, cache: int) -> EngineConfig:
        """Return the engine's options with a KV cache of this size. Requests become shorter if the longest do not fit
        and no option sets their length."""
        if self.is_fixed or not cache:
            return config
        config = replace(config, cache=replace(config.cache, kv_cache_memory_bytes=cache))
        if config.model.max_model_len is None and cache < self.whole_cache:
            config = replace(config, model=replace(config.model, max_model_len=-1))
        return config

    def __str__(self) -> str:
        cache = f", KV cache {gib(self.least_cache)}" if self.least_cache else ""
        return f"{gib(self.least)} (weights {gib(self.weights)}, process {gib(self.process)}{cache})"


@dataclass(frozen=True)
class Machine:
    """The memory of this machine for models. memory: bytes in total. need: estimates the need of a model from its
    files and options. It may take long, and raises ValueError or OSError for files that are no model."""

    memory: int
    need: Callable[[Path, EngineConfig], Need]


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
