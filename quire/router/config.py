"""The options of `quire route`. Further options, such as the port, are shared with `quire serve`."""

from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import urlsplit

from quire.config.declaration import at_least, check_seconds
from quire.config.engine import ConfigError
from quire.config.kv_events import is_endpoint
from quire.config.kv_transfer import KVTransferOptions

Policy = Literal["least-loaded", "prefix", "cached", "round-robin"]


@dataclass(frozen=True)
class PrefillServer:
    """A server that only computes prompts. host, port: its kv_ip and kv_port, where others fetch their KV blocks."""

    url: str
    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse URL or URL=HOST:PORT. Raises ConfigError."""
        given, _, address = text.partition("=")
        url = _base_url("prefill", given)
        parts = urlsplit(f"//{address}" if address else url)
        try:
            port = KVTransferOptions.kv_port if not address or parts.port is None else parts.port
        except ValueError:  # the port is no number
            port = 0
        if not (parts.hostname and port) or (address and (parts.netloc != address or "@" in address)):
            raise ConfigError(f"prefill must be a URL, or URL=HOST:PORT with the kv_ip and kv_port, got {text!r}")
        return cls(url, parts.hostname, port)


@dataclass(frozen=True)
class RouteConfig:
    """Raises ConfigError for values that cannot be used.

    backend: the servers' URLs. session_header, session_field: the header and the field of the body that name a
    session. max_connections: limit per server. prefill: servers that only compute prompts, in the format of
    PrefillServer.read. prefill_min_bytes: the smallest body whose prompt they compute. kv_events: for each backend, the
    ZeroMQ addresses of its KV events, separated by commas. kv_events_replay: the replay addresses of these streams, in
    the same format. rules: a file of rules for a semantic router. by_model: the servers have different models, and a
    request goes to those that list its model; implied by rules. Times are in seconds.
    """

    backend: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    prefill_min_bytes: int = 1024
    policy: Policy = "least-loaded"
    kv_events: tuple[str, ...] = ()
    kv_events_replay: tuple[str, ...] = ()
    session_header: str | None = None
    session_field: str | None = None
    rules: str | None = None
    by_model: bool = False
    max_retries: int = 1
    max_connections: int = 1024
    connect_timeout: float = 5.0
    health_check_interval: float = 2.0
    health_check_timeout: float = 5.0
    health_failure_threshold: int = 3

    def __post_init__(self) -> None:
        at_least(self, 0, "max_retries", "prefill_min_bytes")
        at_least(self, 1, "max_connections", "health_failure_threshold")
        for name in ("connect_timeout", "health_check_interval", "health_check_timeout"):
            check_seconds(name, getattr(self, name))
        object.__setattr__(self, "backend", tuple(_base_url("backend", url) for url in self.backend))
        object.__setattr__(self, "by_model", self.by_model or self.rules is not None)
        object.__setattr__(self, "prefill", tuple(self.prefill))
        object.__setattr__(self, "kv_events", tuple(self.kv_events))
        object.__setattr__(self, "kv_events_replay", tuple(self.kv_events_replay))
        if (self.policy == "cached") != bool(self.kv_events) or len(self.kv_events) not in (0, len(self.backend)):
            raise ConfigError("policy=cached needs kv_events, with an address for each backend, in their order")
        self._check_streams()
        if self.prefill and self.by_model:
            raise ConfigError("prefill servers compute the prompts of one model, so they exclude by_model and rules")
        if not self.backend:
            raise ConfigError("backend must name at least one server, such as http://127.0.0.1:8001")
        urls = [*self.backend, *(server.url for server in self.prefill_servers)]
        for number, url in enumerate(urls):
            if url in urls[:number]:
                names = "backend names" if number < len(self.backend) else "prefill and backend name"
                raise ConfigError(f"{names} a server twice: {url}")

    def _check_streams(self) -> None:
        """Check the addresses of KV events."""
        streams, replays = ([text.count(",") for text in texts] for texts in (self.kv_events, self.kv_events_replay))
        if replays and replays != streams:
            raise ConfigError("kv_events_replay needs an address for each one of kv_events, in their order")
        for name in ("kv_events", "kv_events_replay"):
            for endpoint in ",".join(getattr(self, name)).split(",") if getattr(self, name) else ():
                if not is_endpoint(endpoint):
                    raise ConfigError(f"{name} must be tcp://HOST:PORT or ipc://PATH, got {endpoint!r}")

    @property
    def streams(self) -> list[tuple[int, str, str | None]]:
        """Return (server number, address, replay address) for each stream of KV events."""
        found = [(i, endpoint) for i, endpoints in enumerate(self.kv_events) for endpoint in endpoints.split(",")]
        replays = ",".join(self.kv_events_replay).split(",") if self.kv_events_replay else [None] * len(found)
        return [(*stream, replay) for stream, replay in zip(found, replays, strict=True)]

    @property
    def prefill_servers(self) -> tuple[PrefillServer, ...]:
        return tuple(PrefillServer.read(text) for text in self.prefill)


def _base_url(name: str, url: str) -> str:
    """Return the URL without trailing slashes. Raises ConfigError if it cannot be a prefix of other URLs."""
    parts = urlsplit(url)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        valid = False
    if not valid or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{name} must be a URL such as http://127.0.0.1:8001, got {url!r}")
    return url.rstrip("/")
