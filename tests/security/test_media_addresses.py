"""The addresses that media are not fetched from, compared with IANA's special-purpose registries.

data/special_purpose_addresses.csv has the prefixes of both registries, for IPv4 and IPv6. "N/A" there is false here.
"""

from __future__ import annotations

import csv
import ipaddress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.multimodal.addresses import is_public
from quire.multimodal.fetch import fetch
from quire.multimodal.pictures import MediaError

REGISTRY = list(csv.DictReader((Path(__file__).parent / "data/special_purpose_addresses.csv").open(encoding="utf-8")))
NETWORKS = {row["prefix"]: ipaddress.ip_network(row["prefix"]) for row in REGISTRY}
GLOBAL = [NETWORKS[row["prefix"]] for row in REGISTRY if row["globally_reachable"] == "true"]

# What the registries do not have: metadata services of clouds, multicast, retired networks, and IPv4 within IPv6.
PRIVATE = """
    169.254.169.254 168.63.129.16 100.100.100.200 192.0.0.192 169.254.170.2 fd00:ec2::254 fd20:ce::254
    fec0::1 feff::1 fe80::1 fe80::1%eth0 ff02::1 ff0e::1 224.0.0.1 239.255.255.250 3ffe::1
    ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:127.0.0.1 ::ffff:0:8.8.8.8
    64:ff9b::127.0.0.1 64:ff9b::10.0.0.1 64:ff9b::169.254.169.254 64:ff9b::168.63.129.16 64:ff9b:1::8.8.8.8
    2002:7f00:1:: 2002:a9fe:a9fe::1 2002:808:808::1 2001:0:7f00:1::1 2001::f5ff:fffe 1::1 4000::1 8000::1
""".split()
PUBLIC = """
    1.1.1.1 8.8.8.8 93.184.215.14 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.1 168.63.129.15 168.63.129.17
    169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.1 192.0.3.1 192.88.98.1 192.88.100.1
    192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 198.51.99.255 203.0.112.255 203.0.114.0 223.255.255.255
    2001:200::1 2001:4860:4860::8888 2001:db7:ffff::1 2001:db9::1 2003::1 2606:4700::1111 2a00:1450::1 64:ff9b::8.8.8.8
""".split()


@pytest.mark.parametrize("row", REGISTRY, ids=lambda row: row["prefix"])
def test_what_is_not_globally_reachable_is_not_public(row):
    network = NETWORKS[row["prefix"]]
    middle = network[network.num_addresses // 2]
    if row["globally_reachable"] == "false":
        for address in (network[0], middle, network[-1]):
            if not any(address.version == other.version and address in other for other in GLOBAL):
                assert not is_public(str(address)), address


@pytest.mark.parametrize("address", PRIVATE)
def test_clouds_and_addresses_within_addresses_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_beside_the_special_ones_are_public(address):
    assert is_public(address)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(address=st.ip_addresses())
def test_no_address_of_a_registered_prefix_is_public(address):
    special = [n for n in NETWORKS.values() if n.version == address.version and address in n and n not in GLOBAL]
    reachable = [n for n in GLOBAL if n.version == address.version and address in n]
    if special and not reachable:
        assert not is_public(str(address))


@pytest.mark.parametrize("address", [a for a in PRIVATE if "%" not in a])
def test_nothing_is_fetched_from_them(address):
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(MediaError, match=r"private address|cannot be resolved"):
        fetch(f"http://{host}:9/")
