"""The options of profiles. What they mean is known to quire.observability.profiling, which is loaded when one is given."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from quire.options.declaration import option


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles."""

    profiler_config: dict[str, Any] = option({}, json=True)
    enable_layerwise_nvtx_tracing: bool = False

    def __post_init__(self) -> None:
        if self.profiler_config:
            import_module("quire.options.profiler").ProfilerConfig.read(self.profiler_config)
        if self.enable_layerwise_nvtx_tracing:
            import_module("quire.observability.profiling.ranges").check()
