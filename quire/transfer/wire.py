"""Connections between ranks of different engines: TCP, on which both ends prove that they know the cluster's secret.

    server -> client    magic, 32 random bytes
    client -> server    32 random bytes, proof: HMAC-SHA256 of a label and both ends' random bytes, with the secret
    server -> client    proof, with another label

Then both ends send frames: the length of the body, an HMAC-SHA256 of the frame's number and the body with a key of this
connection and direction, and the body. So nobody without the secret can ask for blocks, or repeat or change what is
asked and answered. The bytes of blocks follow a frame as they are: they are neither encrypted nor authenticated, since
that would cost more than sending them. Whoever can change packets on the way can change what the model has read, so the
network between engines must be trusted that far. A bulk transfer ends when nothing has moved for `timeout` seconds.

An executor and its ranks use `quire.executor.link` instead: once both have proved that they know the engine's key,
they believe what arrives, without a proof of each frame.
"""

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from itertools import chain, count, islice
from typing import Any, TypeVar

import msgspec

HANDSHAKE_SECONDS = 5.0
TIMEOUT_SECONDS = 10.0
MOST_BODY_BYTES = 1 << 20
_MAGIC = b"quire-kv-blocks\1"
_NONCE = _PROOF = 32
_HEAD = struct.Struct(">I32s")
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # finds a machine that has gone

T = TypeVar("T")


class WrongSecretError(ConnectionError):
    """The other end does not know the secret."""


class Connection:
    """An authenticated connection. Its methods raise OSError, and ValueError for what no honest peer sends."""

    def __init__(self, link: socket.socket, send_key: bytes, receive_key: bytes, timeout: float) -> None:
        self._link = link
        self._send_key = send_key
        self._receive_key = receive_key
        self._timeout = timeout
        self._sent, self._received = count(), count()
        link.settimeout(timeout)

    def send(self, message: msgspec.Struct, data: Iterable[memoryview] = ()) -> None:
        """Send a message, and bytes behind it."""
        body = msgspec.msgpack.encode(message)
        if len(body) > MOST_BODY_BYTES:
            raise ValueError(f"a message of {len(body):,} bytes is too long")
        head = _HEAD.pack(len(body), _tag(self._send_key, next(self._sent), body))
        self.send_bytes(chain((memoryview(head + body),), data))

    def send_bytes(self, data: Iterable[memoryview]) -> None:
        pieces = iter(data)
        while batch := list(islice(pieces, _IOV_MAX)):
            _all(self._link.sendmsg, batch)

    def receive(self, decoder: "msgspec.msgpack.Decoder[T]", waits: bool = False) -> T | None:
        """The next message; None if the other end has closed the connection instead. waits: for its beginning, as long
        as it takes."""
        self._link.settimeout(None if waits else self._timeout)
        first = self._link.recv(1)
        self._link.settimeout(self._timeout)
        if not first:
            return None
        length, tag = _HEAD.unpack(first + _receive(self._link, _HEAD.size - 1))
        if length > MOST_BODY_BYTES:
            raise ValueError(f"a message of {length:,} bytes is too long")
        body = _receive(self._link, length)
        if not hmac.compare_digest(tag, _tag(self._receive_key, next(self._received), body)):
            raise ValueError("a message is not authentic")
        return decoder.decode(body)

    def receive_into(self, targets: Iterable[memoryview]) -> None:
        """Fill the targets with the bytes behind a message."""
        pieces = iter(targets)
        while batch := list(islice(pieces, _IOV_MAX)):
            _all(lambda views: self._link.recvmsg_into(views)[0], batch)

    def interrupt(self) -> None:
        """Have calls of other threads end at once."""
        shut(self._link)

    def close(self) -> None:
        self._link.close()


def accept(
    link: socket.socket, secret: bytes, handshake: float = HANDSHAKE_SECONDS, timeout: float = TIMEOUT_SECONDS
) -> Connection:
    """The server's end of a new connection. Raises OSError; WrongSecretError if the client does not know the secret."""
    _prepare(link)
    ends = time.monotonic() + handshake
    own = secrets.token_bytes(_NONCE)
    link.sendall(_MAGIC + own)
    answer = _receive(link, _NONCE + _PROOF, ends)
    nonces = own + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _derive(secret, b"client", nonces)):
        raise WrongSecretError("it does not have this cluster's secret (cluster_secret_file)")
    link.sendall(_derive(secret, b"server", nonces))
    return Connection(link, _derive(secret, b"answers", nonces), _derive(secret, b"requests", nonces), timeout)


def connect(
    host: str, port: int, secret: bytes, handshake: float = HANDSHAKE_SECONDS, timeout: float = TIMEOUT_SECONDS
) -> Connection:
    """The client's end of a new connection. Raises OSError; WrongSecretError if the server does not know the secret."""
    ends = time.monotonic() + handshake
    link = socket.create_connection((host, port), handshake)
    try:
        _prepare(link)
        greeting = _receive(link, len(_MAGIC) + _NONCE, ends)
        if not greeting.startswith(_MAGIC):
            raise ConnectionError(f"no server of KV blocks listens on port {port}")
        own = secrets.token_bytes(_NONCE)
        nonces = greeting[len(_MAGIC) :] + own
        link.sendall(own + _derive(secret, b"client", nonces))
        try:
            proof = _receive(link, _PROOF, ends)
        except ConnectionError:
            raise WrongSecretError("it has another cluster_secret_file, and has closed the connection") from None
        if not hmac.compare_digest(proof, _derive(secret, b"server", nonces)):
            raise WrongSecretError("it does not have this cluster's secret (cluster_secret_file)")
        return Connection(link, _derive(secret, b"requests", nonces), _derive(secret, b"answers", nonces), timeout)
    except BaseException:
        link.close()
        raise


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def shut(link: socket.socket) -> None:
    """Have the calls of other threads that use the socket end at once."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _prepare(link: socket.socket) -> None:
    """Set the options of a connection. The system finds good sizes of buffers itself; sizes that are set are bounded
    by lower limits than its own."""
    link.settimeout(HANDSHAKE_SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def _derive(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"quire kv blocks " + label + b"\0" + nonces, "sha256")


def _tag(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + body, "sha256")


def _receive(link: socket.socket, size: int, ends: float | None = None) -> bytes:
    """Exactly `size` bytes. ends: the time at which they must be here; None: they must not pause for too long."""
    data = bytearray()
    while len(data) < size:
        if ends is not None:
            link.settimeout(max(0.001, ends - time.monotonic()))
        part = link.recv(size - len(data))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        data += part
    return bytes(data)


def _all(move: Any, views: Sequence[memoryview]) -> None:
    """Call `move`, which sends or fills a part of these views, until all of them have been."""
    start = 0
    views = list(views)
    while start < len(views):
        moved = move(views[start:] if start else views)
        if not moved:
            raise ConnectionError("the other end has closed the connection")
        while start < len(views) and moved >= len(views[start]):
            moved -= len(views[start])
            start += 1
        if moved:
            views[start] = views[start][moved:]
