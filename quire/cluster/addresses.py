"""Finds this machine's addresses and network interfaces that lead to another machine."""

import ipaddress
import os
import socket

from quire.config.engine import ConfigError
from quire.messages.errors import error_text


def resolve(host: str) -> str:
    """Return the IP address of a host. Raises ConfigError for an unknown name."""
    try:
        return str(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"the address {host!r} is unknown: {error_text(error)}") from error


def own_address(host: str) -> str:
    """Return this machine's source address for packets to `host`, or `host` itself if it belongs to this machine.

    Nothing is sent. Raises ConfigError for an unknown name or a network that cannot be reached.
    """
    address = resolve(host)
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no way from this machine to {host!r}: {error_text(error)}") from error


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address of this machine, such as eth0."""
    import psutil  # imported here, since an engine on one machine does not need it

    wanted = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found = ipaddress.ip_address(entry.address.partition("%")[0])
                if found == wanted:
                    return str(name)
    return None


def interface_variables(address: str) -> dict[str, str]:
    """Return the environment variables that make Gloo and NCCL use the interface with this address. Variables that the
    user has set are not changed."""
    name = "lo" if ipaddress.ip_address(address).is_loopback else interface_of(address)
    wanted = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {variable: value for variable, value in wanted.items() if variable not in os.environ}
