"""Distinguishes public IP addresses on the internet from private and special ones.

The list is our own, since that of Python's `ipaddress` depends on its version. It contains IANA's special-purpose
registries (tests compare them), IPv4 addresses within IPv6, and the addresses of clouds' metadata services.
"""

import ipaddress

# The private networks of IPv4; all others are public. The last one is Azure's; other clouds use 169.254.169.254 and
# 100.100.100.200.
_PRIVATE_4 = """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
    192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24
    203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 168.63.129.16/32
"""
# Of IPv6: IANA's allocations to the internet, minus the special ones: 2001::/32 is Teredo, 2002::/16 is 6to4.
_PUBLIC_6 = "2000::/3"
_PRIVATE_6 = "2001::/23 2001:db8::/32 2002::/16 2620:4f:8000::/48 3fff::/20 3ffe::/16"
# For translators of networks without IPv4: the last four bytes are the destination's IPv4 address.
_NAT64 = "64:ff9b::/96"


def _networks(text: str) -> "tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]":
    return tuple(map(ipaddress.ip_network, text.split()))


_NETWORKS = {text: _networks(text) for text in (_PRIVATE_4, _PUBLIC_6, _PRIVATE_6, _NAT64)}


def is_public(text: str) -> bool:
    """text: an address, perhaps with the zone of an interface. Raises ValueError."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and _is_in(address, _NAT64):
        address = ipaddress.IPv4Address(address.packed[-4:])
    if isinstance(address, ipaddress.IPv4Address):
        return not _is_in(address, _PRIVATE_4)
    return _is_in(address, _PUBLIC_6) and not _is_in(address, _PRIVATE_6)


def _is_in(address: ipaddress.IPv4Address | ipaddress.IPv6Address, networks: str) -> bool:
    return any(address in network for network in _NETWORKS[networks])
