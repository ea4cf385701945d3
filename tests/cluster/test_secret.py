"""Sockets between machines: the keys that a secret gives, and who is refused."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from quire.cluster import secret as secrets
from quire.cluster.secret import Admission, ClusterSecret, NoSecret
from quire.config.engine import ConfigError
from support.waiting import LONGEST

SECRET = ClusterSecret(bytes(range(32)))


@pytest.fixture
def server() -> Iterator[tuple[Any, str]]:
    """A socket that listens, and its address."""
    context = zmq.Context()
    admission = Admission(context, SECRET)
    router = context.socket(zmq.ROUTER)
    address = SECRET.listen(router, "127.0.0.1")
    yield router, address
    router.close(linger=0)
    admission.close()
    context.term()


@pytest.fixture
def client() -> Iterator[Any]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    yield dealer
    context.destroy(linger=0)


def receives(router: Any, address: str) -> list[bytes]:
    """The messages that arrive before one of a client that has the secret and begins now."""
    found = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as last:
        last.linger = 0
        SECRET.connect(last, address)
        last.send(b"the last")
        while (message := router.recv_multipart()[1]) != b"the last":
            found.append(message)
    return found


def test_equal_secrets_give_equal_keys_and_others_give_others():
    again, other = ClusterSecret(bytes(range(32))), ClusterSecret(bytes(range(1, 33)))
    assert (again._server, again._client) == (SECRET._server, SECRET._client)
    keys = [*SECRET._server, *SECRET._client, *other._server, *other._client]
    assert len(set(keys)) == 8
    for public, private in (SECRET._server, SECRET._client):
        assert zmq.curve_public(private) == public
        assert SECRET.secret not in z85.decode(private)
    assert SECRET.admits(z85.decode(SECRET._client[0]), "203.0.113.5")
    assert not SECRET.admits(z85.decode(SECRET._server[0]), "203.0.113.5")


@pytest.mark.parametrize(
    ("address", "admitted"),
    [
        *dict.fromkeys(
            ("127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.1", "::1", "fd12::1", "::ffff:10.0.0.1"), True
        ).items(),
        *dict.fromkeys(("203.0.113.5", "172.32.0.1", "2001:db8::1", "::ffff:8.8.8.8", "", "localhost"), False).items(),
    ],
)
def test_without_a_secret_only_addresses_in_private_networks_are_admitted(address, admitted):
    nobody = NoSecret()
    assert nobody.admits(z85.decode(nobody._client[0]), address) == admitted
    assert not nobody.admits(z85.decode(SECRET._client[0]), address)


def test_a_client_without_a_secret_does_not_reach_a_server_that_has_one(server, client):
    router, address = server
    NoSecret().connect(client, address)
    client.send(b"let me in")
    assert receives(router, address) == []


@pytest.mark.parametrize("address", ["tcp://203.0.113.5:14579", "tcp://[2001:db8::1]:14579", "tcp://localhost:14579"])
def test_without_a_secret_only_addresses_in_private_networks_are_connected_to(client, address):
    with pytest.raises(zmq.ZMQError, match="is not in a private network"):
        NoSecret().connect(client, address)


def test_a_client_with_the_secret_is_heard_and_answered(server, client):
    router, address = server
    SECRET.connect(client, address)
    client.send(b"hello")
    identity, said = router.recv_multipart()
    assert said == b"hello"
    router.send_multipart([identity, b"welcome"])
    assert client.recv() == b"welcome"


def connect_with_another_secret(client: Any, address: str) -> None:
    ClusterSecret(bytes(32)).connect(client, address)


def connect_without_a_secret(client: Any, address: str) -> None:
    client.connect(address)


def connect_with_the_key_of_the_server_alone(client: Any, address: str) -> None:
    client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
    client.curve_serverkey = SECRET._server[0]
    client.connect(address)


def connect_by_another_mechanism(client: Any, address: str) -> None:
    client.plain_username, client.plain_password = b"quire", SECRET.secret.hex().encode()
    client.connect(address)


@pytest.mark.parametrize(
    "connect",
    [
        connect_with_another_secret,
        connect_without_a_secret,
        connect_with_the_key_of_the_server_alone,
        connect_by_another_mechanism,
    ],
)
def test_a_client_that_does_not_know_the_secret_is_not_heard(server, client, connect):
    router, address = server
    ended = router.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_DISCONNECTED
    )
    connect(client, address)
    with suppress(zmq.Again):  # the handshake may have failed already, and then nobody is there to send to
        client.send(b"hello", zmq.NOBLOCK)
    assert ended.poll(1000 * LONGEST)
    router.disable_monitor()
    assert receives(router, address) == []
    assert not client.poll(0)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", random.Random(0).randbytes(1 << 16), b"\xff" * 64, b""],
    ids=["http", "noise", "ones", "nothing"],
)
def test_somebody_who_scans_ports_learns_no_more_than_that_zeromq_listens(server, said):
    router, address = server
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as scanner:
        scanner.sendall(said)
        scanner.settimeout(0.5)
        try:
            answer = scanner.recv(1 << 16)
        except OSError:
            answer = b""
        assert len(answer) <= 64  # ZeroMQ's greeting, which names the mechanism
    assert receives(router, address) == []


def test_a_client_that_sends_a_message_that_is_too_long_loses_its_connection(client, monkeypatch):
    monkeypatch.setattr(secrets, "MOST_MESSAGE_BYTES", 1000)
    context = zmq.Context()
    admission = Admission(context, SECRET)
    router = context.socket(zmq.ROUTER)
    address = SECRET.listen(router, "127.0.0.1")
    SECRET.connect(client, address)
    broken = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.send(bytes(500))
    client.send(bytes(2000))
    assert broken.poll(1000 * LONGEST)
    assert [len(message) for message in receives(router, address)] == [500]
    router.close(linger=0)
    admission.close()
    context.term()


def test_a_frame_that_claims_to_be_too_long_ends_a_connection_before_the_handshake(server):
    _, address = server
    host, port = address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(greeting + b"\x06" + struct.pack("!Q", secrets.MOST_MESSAGE_BYTES + 1))
        peer.settimeout(LONGEST)
        while peer.recv(1 << 16):
            """The greeting, and then the end."""


def test_a_secret_file_is_read(tmp_path: Path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET.secret.hex().encode() + b"\n")
    path.chmod(0o600)
    assert ClusterSecret.read(str(path)).secret == SECRET.secret.hex().encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize(("mode", "is_fine"), [(0o640, True), (0o440, True), (0o660, False), (0o644, False)])
def test_a_group_may_read_a_secret_of_another_user(tmp_path: Path, mode, is_fine):
    path = tmp_path / "secret"
    path.write_bytes(SECRET.secret)
    os.chown(path, 54321, 0)
    path.chmod(mode)
    if is_fine:
        assert ClusterSecret.read(str(path)).secret == SECRET.secret
    else:
        with pytest.raises(ConfigError, match="other users"):
            ClusterSecret.read(str(path))


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"x" * 64, 0o640, "can be used by other users of this machine; run chmod 600"),
        (b"x" * 64, 0o602, "can be used by other users"),
        (b"x" * 31, 0o600, "must have at least 32 bytes, got 31; make it with: .*openssl rand -hex 32"),
        (b"x" * 20 + b"\n" * 20, 0o600, "must have at least 32 bytes, got 20"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_secret_file_that_is_not_secret_is_refused_with_its_path(tmp_path: Path, content, mode, message):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=message) as error:
        ClusterSecret.read(str(path))
    assert f"cluster_secret_file='{path}'" in str(error.value)
