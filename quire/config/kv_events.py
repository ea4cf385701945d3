"""The fields of the option kv_events_config, with vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from quire.config.declaration import AtLeast1, ConfigError, read_object

LOOPBACK = "127.0.0.1", "localhost", "[::1]"


@dataclass(frozen=True)
class KVEventOptions:
    """Whether and where a core publishes its prefix-cache events: see engine/kv_events.py.

    endpoint, replay_endpoint: ZeroMQ addresses, tcp://HOST:PORT or ipc://PATH. topic: the first part of each message.
    buffer_steps: the number of batches kept for replays. hwm: the number of batches queued for one slow subscriber
    before batches are dropped. max_queue_size: the number of batches queued for the publishing thread.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: AtLeast1 = 10_000
    hwm: AtLeast1 = 100_000
    max_queue_size: AtLeast1 = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is not None and not is_endpoint(address):
                raise ConfigError(f"{name} must be tcp://HOST:PORT or ipc://PATH, got {address!r}")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self | None:
        """None if events are disabled. Raises ConfigError for an unknown or invalid field."""
        options = read_object("kv_events_config", given, cls)
        return options if options.enable_kv_cache_events and options.publisher != "null" else None

    def binds(self) -> bool:
        """Whether subscribers connect to `endpoint`. Otherwise a subscriber on another machine listens there.

        As in vLLM, hosts written as * or with :: are bound, and others are connected to; but loopback is also bound.
        """
        host = self.endpoint.removeprefix("tcp://").rpartition(":")[0]
        return self.endpoint.startswith("ipc://") or "*" in host or "::" in host or host in LOOPBACK


def is_endpoint(address: str) -> bool:
    """Whether it is a ZeroMQ address, tcp://HOST:PORT or ipc://PATH."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_tcp = address.startswith("tcp://") and bool(host) and port.isascii() and port.isdigit()
    return is_tcp or address.startswith("ipc://")


def of_rank(address: str, rank: int) -> str:
    """Return the address of the core `rank`, as in vLLM: the port is that of core 0 plus the rank."""
    if address.startswith("ipc://"):
        return f"{address}_dp{rank}" if rank else address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"
