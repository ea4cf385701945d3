"""The connection between the executor and one of its ranks: what they say to each other, as msgpack over TCP.

A rank connects to the address at which the executor listens. Each then shows the other that it knows the same key.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from typing import Any, Self

import msgspec

from quire.config import ConfigError, EngineConfig
from quire.kvcache.specs import KVCacheSize
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from quire.parallel.sizes import MeshSizes

BEAT_SECONDS = 1.0  # between two heartbeats, in both directions
_GREETING_SECONDS = 5.0  # in which somebody who connects must show the key
_KEY_BYTES = 32
_LENGTH = struct.Struct("!Q")  # of a message, in bytes, before it


class Heartbeat(msgspec.Struct, array_like=True, tag=True):
    """Sent in both directions when there is nothing else to say: the other side is not stopped."""


# ---- from the executor to a rank


class Start(msgspec.Struct, array_like=True, tag=True):
    """The first message: which part of which model the rank holds. directory, max_model_len: as a Worker takes them."""

    config: EngineConfig
    directory: str
    max_model_len: int
    sizes: MeshSizes
    meeting: tuple[str, int]  # host and port of the store at which the ranks meet
    num_threads: int
    log_level: str


class Submit(msgspec.Struct, array_like=True, tag=True):
    step: SchedulerOutput


class Sample(msgspec.Struct, array_like=True, tag=True):
    step_id: int
    masks: TokenMasks | None = None


Order = Start | Submit | Sample | Heartbeat


# ---- from a rank to the executor


class Hello(msgspec.Struct, array_like=True, tag=True):
    """The first message."""

    rank: int


class Ready(msgspec.Struct, array_like=True, tag=True):
    """The rank has loaded its part of the model."""

    kv_cache: KVCacheSize


class Result(msgspec.Struct, array_like=True, tag=True):
    """Of a step that was sampled. Rank 0 alone sends it; all ranks have the same."""

    output: ModelRunnerOutput


class Broken(msgspec.Struct, array_like=True, tag=True):
    """The last message of a rank that fails. by_user: an option or the model is wrong, and the reason says which."""

    reason: str
    by_user: bool = False


Reply = Hello | Ready | Result | Broken | Heartbeat


def encode(message: msgspec.Struct) -> bytes:
    """Raises ConfigError for an option whose value another process cannot be told."""
    return msgspec.msgpack.encode(message, enc_hook=_as_data)


def _as_data(value: Any) -> str:
    """Classes (of logits processors) travel by name, "package.module:Class"."""
    if not isinstance(value, type):
        raise ConfigError(f"{value!r} cannot be sent to the processes that share the model; give it as plain data")
    if value.__module__ == "__main__" or "<locals>" in value.__qualname__:
        raise ConfigError(
            f"logits_processors: the processes that share the model cannot import {value.__qualname__}, which is "
            f"defined in {'the main program' if value.__module__ == '__main__' else 'a function'}; put it into a module"
        )
    return f"{value.__module__}:{value.__qualname__}"


class Link:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connected: socket.socket, key: bytes, role: bytes) -> None:
        """role: of this end, b"executor" or b"rank". Raises ConnectionError if the other end does not know the key."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._lock = threading.Lock()
        self.expect_within(_GREETING_SECONDS)
        try:
            self._authenticate(key, role)
        except OSError:
            self.close()
            raise

    @classmethod
    def connect(cls, host: str, port: int, key: bytes) -> Self:
        """The end of a rank."""
        return cls(socket.create_connection((host, port)), key, b"rank")

    def expect_within(self, seconds: float) -> None:
        """Have `receive` raise BlockingIOError when nothing has come for so long.

        The kernel keeps this time, not Python: it starts again when a stopped process continues.
        """
        whole, part = divmod(seconds, 1)
        timeout = struct.pack("ll", int(whole), int(part * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def send(self, message: bytes) -> None:
        """Raises OSError if the other end has gone."""
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, longest: int | None = None) -> bytes:
        """The next message. Raises OSError if the other end has gone, or sends more than `longest` bytes."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if longest is not None and length > longest:
            raise ConnectionError("a message is too long")
        return self._read(length)

    def _authenticate(self, key: bytes, role: bytes) -> None:
        challenge = secrets.token_bytes(_KEY_BYTES)
        self.send(challenge)
        self.send(hmac.digest(key, role + self.receive(_KEY_BYTES), "sha256"))
        other = b"rank" if role == b"executor" else b"executor"
        if not hmac.compare_digest(self.receive(_KEY_BYTES), hmac.digest(key, other + challenge, "sha256")):
            raise ConnectionError("the other end does not know the key")

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("the other end has closed the connection")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Also wakes a thread that waits in `receive`, at both ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
