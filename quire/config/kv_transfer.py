"""The fields of the option kv_transfer_config, with vLLM's names."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from quire.config.declaration import ConfigError, read_object

Connector = Literal["QuireConnector", "NixlConnector", "P2pNcclConnector", "SharedMemoryConnector", "TcpConnector"]
# vLLM's names of connectors with the same function as Quire's, and their transports. Without a transport, any that both
# ends support is used.
CONNECTORS: dict[Connector, tuple[str, ...]] = {
    "QuireConnector": (),
    "NixlConnector": ("nixl",),
    "P2pNcclConnector": (),
    "SharedMemoryConnector": ("shared_memory",),
    "TcpConnector": ("tcp",),
}
# Networks that are not reachable from the internet, and this machine.
PRIVATE_NETWORKS = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "fc00::/7", "fe80::/10", "::1/128"]
_PRIVATE = [ipaddress.ip_network(network) for network in PRIVATE_NETWORKS]
_NO_EFFECT = "kv_buffer_device", "kv_buffer_size", "kv_parallel_size", "kv_rank"  # vLLM's; without a choice


@dataclass(frozen=True)
class TransferExtras:
    """producers: the networks of the producers that requests may name; None for all. streams: the number of TCP
    connections to each rank of a producer."""

    producers: list[str] | None = None
    streams: Annotated[int, Meta(ge=1, le=16)] = 2

    def __post_init__(self) -> None:
        try:
            _ = self.networks
        except ValueError as error:
            raise ConfigError(
                f'producers must be a list of networks such as ["10.0.0.0/24"], got {self.producers!r}'
            ) from error

    @cached_property
    def networks(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network] | None:
        """The networks of the producers."""
        return None if self.producers is None else [ipaddress.ip_network(network) for network in self.producers]


@dataclass(frozen=True)
class KVTransferOptions:
    """How an engine sends computed prompts to other engines (kv_producer), receives them (kv_consumer), or both.

    kv_ip, kv_port: of a producer: the address at which consumers find it. The engine listens at kv_port, and its rank r
    at kv_port + 1 + r. engine_id: its name in responses. kv_load_failure_policy: the action if blocks do not arrive:
    only "recompute". kv_connector_extra_config: see TransferExtras.
    """

    kv_connector: Connector = "QuireConnector"
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_ip: str = "127.0.0.1"
    kv_port: Annotated[int, Meta(ge=1, le=65535)] = 14579
    engine_id: str | None = None
    kv_load_failure_policy: Literal["recompute"] = "recompute"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str = "quire.transfer"

    def __post_init__(self) -> None:
        try:
            is_place = not ipaddress.ip_address(self.kv_ip).is_unspecified
        except ValueError:
            is_place = False
        if not is_place:
            raise ConfigError(f"kv_ip must be the IP address at which consumers find the engine, got {self.kv_ip!r}")
        _ = self.extra  # raises ConfigError

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for an unknown or invalid field."""
        read = {name: value for name, value in given.items() if name not in _NO_EFFECT}
        return read_object("kv_transfer_config", read, cls)

    def within_private_networks(self) -> Self:
        """Return the options without a secret: both ends of a transfer must be in private networks. Raises
        ConfigError."""
        given = self.extra.networks
        public = [str(network) for network in given or () if not any(_contains(p, network) for p in _PRIVATE)]
        if not is_private(self.kv_ip):
            public.append(f"kv_ip={self.kv_ip}")
        if public:
            raise ConfigError(
                f"insecure_transfers works only in private networks ({', '.join(PRIVATE_NETWORKS)}), and not with "
                f"{', '.join(public)}; use cluster_secret_file instead"
            )
        if given is not None:
            return self
        return replace(
            self, kv_connector_extra_config={**self.kv_connector_extra_config, "producers": PRIVATE_NETWORKS}
        )

    @cached_property
    def extra(self) -> TransferExtras:
        """Return the fields of kv_connector_extra_config. Raises ConfigError."""
        return read_object("kv_connector_extra_config", self.kv_connector_extra_config, TransferExtras)

    @property
    def produces(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        return self.kv_role != "kv_producer"


def is_private(address: str) -> bool:
    """Whether this is an IP address of a private network or of this machine."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return any((mapped or found) in network for network in _PRIVATE)


def _contains(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network, other: ipaddress.IPv4Network | ipaddress.IPv6Network
) -> bool:
    return network.version == other.version and other[0] in network and other[-1] in network
