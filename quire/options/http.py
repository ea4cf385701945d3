"""Limits of HTTP connections, most of which hold before a client has shown its API key."""

from dataclasses import dataclass

from quire.options.declaration import ConfigError, at_least, option


@dataclass(frozen=True)
class HttpLimits:
    """Times are in seconds. The first three names are those of vLLM and uvicorn."""

    h11_max_incomplete_event_size: int = option(64 << 10, size=True)
    h11_max_header_count: int = 100
    timeout_keep_alive: float = 5.0
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    sse_keep_alive_interval: float = 15.0

    def check_http(self) -> None:
        """Raises ConfigError."""
        at_least(self, 256, "h11_max_incomplete_event_size")
        at_least(self, 1, "h11_max_header_count")
        for name in ("timeout_keep_alive", "header_timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a number of seconds above 0, got {getattr(self, name)!r}")
        if not self.sse_keep_alive_interval >= 0:
            raise ConfigError(
                f"sse_keep_alive_interval must be a number of seconds, or 0, got {self.sse_keep_alive_interval!r}"
            )
