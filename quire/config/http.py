"""Limits of HTTP connections. Most of them apply before a client is authenticated."""

from dataclasses import dataclass

from quire.config.declaration import at_least, check_seconds, option


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
            check_seconds(name, getattr(self, name))
        check_seconds("sse_keep_alive_interval", self.sse_keep_alive_interval, zero=True)
