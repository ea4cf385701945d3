"""Which addresses and interfaces of this machine lead to another one."""

from __future__ import annotations

import pytest

from quire.cluster.addresses import interface_of, interface_variables, own_address, resolve
from quire.config.engine import ConfigError


def test_the_way_to_this_machine_is_the_loopback_device():
    assert resolve("localhost") in ("127.0.0.1", "::1")
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None


def test_gloo_and_nccl_use_the_interface_unless_the_user_has_chosen_one(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert interface_variables("127.0.0.1") == {"NCCL_SOCKET_IFNAME": "lo"}
    assert interface_variables("192.0.2.77") == {}


def test_an_unknown_name_is_an_error():
    with pytest.raises(ConfigError, match=r"the address 'no.such.host.invalid' is unknown"):
        own_address("no.such.host.invalid")
