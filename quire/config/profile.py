"""The options of profiles."""

from dataclasses import dataclass
from typing import Any

from quire.config.declaration import ConfigError, option
from quire.platform.extras import install_command


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles."""

    profiler_config: dict[str, Any] = option({}, json=True)
    enable_layerwise_nvtx_tracing: bool = False

    def __post_init__(self) -> None:
        if self.profiler_config:
            from quire.config.profiler import ProfilerConfig

            ProfilerConfig.read(self.profiler_config)
        if self.enable_layerwise_nvtx_tracing:
            check_nvtx()


def check_nvtx() -> None:
    """Raises ConfigError if the library for Nsight Systems ranges is missing."""
    try:
        import nvtx  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"enable_layerwise_nvtx_tracing needs nvtx: {install_command('profile')}") from error
