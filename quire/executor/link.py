"""The connection between the executor and one of its ranks, and their messages: msgpack over TCP.

A rank connects to the address at which the executor listens. Then each side proves that it knows the same key.
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
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, StepCosts, TokenMasks
from quire.parallel.sizes import MeshSizes

BEAT_SECONDS = 1.0  # time between two heartbeats, in both directions
_GREETING_SECONDS = 5.0  # time within which a peer that connects must prove that it knows the key
_KEY_BYTES = 32
_LENGTH = struct.Struct("!Q")  # sent before each message: its length in bytes


class Heartbeat(msgspec.Struct, array_like=True, tag=True):
    """Sent in both directions while there are no other messages, to show that the sender is not stopped."""


# ---- from the executor to a rank


class Start(msgspec.Struct, array_like=True, tag=True):
    """The first message: which part of which model the rank loads. directory, max_model_len: arguments of Worker."""

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
    step_costs: StepCosts = StepCosts()


class Result(msgspec.Struct, array_like=True, tag=True):
    """The result of a sampled step. Only rank 0 sends it, since all ranks have the same."""

    output: ModelRunnerOutput


class Broken(msgspec.Struct, array_like=True, tag=True):
    """The last message of a rank that fails. by_user: whether an option or the model is wrong; `reason` says which."""

    reason: str
    by_user: bool = False


Reply = Hello | Ready | Result | Broken | Heartbeat


def encode(message: msgspec.Struct) -> bytes:
    """The message as msgpack. Raises ConfigError for an option whose value cannot be sent to another process."""
    return msgspec.msgpack.encode(message, enc_hook=_as_data)


def _as_data(value: Any) -> str:
    """Classes (of logits processors) are sent by name, as "package.module:Class"."""
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
        """role: that of this end, b"executor" or b"rank". Raises OSError (ConnectionError for a wrong key) if the other
        end does not prove in time that it knows the key."""
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
        """Connect a rank to its executor, and return the rank's end."""
        return cls(socket.create_connection((host, port)), key, b"rank")

    def expect_within(self, seconds: float) -> None:
        """Make `receive` raise BlockingIOError when nothing has arrived for `seconds`.

        The kernel measures this time, not Python, so it starts again when a stopped process continues.
        """
        whole, fraction = divmod(seconds, 1)
        timeout = struct.pack("ll", int(whole), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def send(self, message: bytes) -> None:
        """Send a message. Raises OSError if the other end has closed the connection."""
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, longest: int | None = None) -> bytes:
        """The next message. Raises OSError if the other end has closed the connection, or if the message has more than
        `longest` bytes."""
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
        """Close the connection. This also wakes threads that wait in `receive`, at both ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
