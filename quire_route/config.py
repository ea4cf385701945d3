"""The options of `quire route`. The others, such as the port, are those of `quire serve`."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from quire.config import ConfigError
from quire.options.declaration import at_least

Policy = Literal["least-loaded", "prefix", "round-robin"]


@dataclass(frozen=True)
class RouteConfig:
    """Raises ConfigError for values that cannot be used.

    backend: the servers' URLs. session_header, session_field: the header and the field of the body that name a
    session. max_connections: to each server. Times are in seconds.
    """

    backend: tuple[str, ...]
    policy: Policy = "least-loaded"
    session_header: str | None = None
    session_field: str | None = None
    max_retries: int = 1
    max_connections: int = 1024
    connect_timeout: float = 5.0
    health_check_interval: float = 2.0
    health_check_timeout: float = 5.0
    health_failure_threshold: int = 3

    def __post_init__(self) -> None:
        at_least(self, 0, "max_retries")
        at_least(self, 1, "max_connections", "health_failure_threshold")
        for name in ("connect_timeout", "health_check_interval", "health_check_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a number of seconds above 0, got {getattr(self, name)!r}")
        object.__setattr__(self, "backend", tuple(_base_url(url) for url in self.backend))
        if not self.backend:
            raise ConfigError("backend must name at least one server, such as http://127.0.0.1:8001")
        if len(set(self.backend)) < len(self.backend):
            raise ConfigError("backend names a server twice")


def _base_url(url: str) -> str:
    """The URL without slashes at its end. Raises ConfigError if it cannot be the beginning of other URLs."""
    parts = urlsplit(url)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        valid = False
    if not valid or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"backend must be a URL such as http://127.0.0.1:8001, got {url!r}")
    return url.rstrip("/")
