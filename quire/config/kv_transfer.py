"""The fields of the option kv_transfer_config, with vLLM's names."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from quire.config.declaration import ConfigError, check_type

# vLLM's names of connectors that do what Quire's does, and the transports that they ask for; none: what both ends have.
CONNECTORS = {
    "QuireConnector": (),
    "NixlConnector": ("nixl",),
    "P2pNcclConnector": (),
    "SharedMemoryConnector": ("shared_memory",),
    "TcpConnector": ("tcp",),
}
_STREAMS = 2
_MOST_STREAMS = 16
_NO_EFFECT = "kv_buffer_device", "kv_buffer_size", "kv_parallel_size", "kv_rank"  # vLLM's; there is nothing to choose


@dataclass(frozen=True)
class KVTransferOptions:
    """How an engine gives computed prompts to other engines (kv_producer), takes them (kv_consumer), or both.

    kv_ip, kv_port: of a producer: the address at which consumers find it. The engine listens at kv_port, and its rank r
    at kv_port + 1 + r. engine_id: what answers call it. kv_load_failure_policy: what happens if blocks do not arrive:
    only "recompute". kv_connector_extra_config: the fields streams and producers, see the properties.
    """

    kv_connector: str = "QuireConnector"
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    engine_id: str | None = None
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str = "quire.transfer"

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for a field that is unknown or wrong."""
        known = {f.name: f.type for f in fields(cls)}
        given = {name: value for name, value in given.items() if name not in _NO_EFFECT}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"kv_transfer_config has no field {name!r}: {', '.join(known)}")
            check_type(f"kv_transfer_config: {name}", value, known[name])
        options = cls(**given)
        if options.kv_connector not in CONNECTORS:
            raise ConfigError(
                f"kv_transfer_config: kv_connector must be one of {', '.join(CONNECTORS)}, got {options.kv_connector!r}"
            )
        try:
            is_place = not ipaddress.ip_address(options.kv_ip).is_unspecified
        except ValueError:
            is_place = False
        if not is_place:
            raise ConfigError(
                "kv_transfer_config: kv_ip must be the IP address at which consumers find the engine, "
                f"got {options.kv_ip!r}"
            )
        if not 1 <= options.kv_port <= 65535:
            raise ConfigError(f"kv_transfer_config: kv_port must be from 1 to 65535, got {options.kv_port}")
        if unknown := options.kv_connector_extra_config.keys() - {"producers", "streams"}:
            raise ConfigError(
                f"kv_transfer_config: kv_connector_extra_config has no field {sorted(unknown)[0]!r}: producers, streams"
            )
        _ = options.producers, options.streams  # raise ConfigError
        if options.kv_load_failure_policy != "recompute":
            raise ConfigError("kv_transfer_config: kv_load_failure_policy must be 'recompute'")
        return options

    @property
    def producers(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network] | None:
        """The networks in which requests may name producers; None for all. Raises ConfigError."""
        given = self.kv_connector_extra_config.get("producers")
        try:
            return None if given is None else [ipaddress.ip_network(network) for network in given]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "kv_transfer_config: kv_connector_extra_config: producers must be a list of networks "
                f'such as ["10.0.0.0/24"], got {given!r}'
            ) from error

    @property
    def streams(self) -> int:
        """The connections to each rank of a producer, for TCP. Raises ConfigError."""
        streams = self.kv_connector_extra_config.get("streams", _STREAMS)
        if type(streams) is not int or not 1 <= streams <= _MOST_STREAMS:
            raise ConfigError(
                "kv_transfer_config: kv_connector_extra_config: streams must be a number from 1 to "
                f"{_MOST_STREAMS}, got {streams!r}"
            )
        return streams

    @property
    def produces(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        return self.kv_role != "kv_producer"
