"""Connections between ranks of different engines: ZeroMQ with CURVE, whose keys come from the cluster's secret.

Only peers with the secret can request blocks. Everything is encrypted and authenticated, including the blocks. A
message is a frame with a msgpack structure, which frames with the bytes of blocks may follow.

An executor and its ranks use `quire.executor.link` instead: after both ends have proved that they know the engine's
key, they trust all further data.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.cluster.monitor import HANDSHAKE_FAILED
from quire.cluster.secret import FULL, ClusterSecret, tcp_address
from quire.messages.errors import error_text

TIMEOUT_SECONDS = 10.0
MOST_FRAME_BYTES = 1 << 20  # a peer that sends a longer frame loses its connection
_FRAME_BYTES = 256 << 10  # of a frame with blocks; ZeroMQ allocates larger frames slowly
_TICK_MILLISECONDS = 100  # an interruption is noticed within this time
_HAS_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED | _HAS_ENDED

T = TypeVar("T")


class WrongSecretError(ConnectionError):
    """The other end does not have the secret."""


class Connection:
    """The client's end of a connection. Only one thread may use it at a time. The first failure ends the connection."""

    def __init__(self, host: str, port: int, secret: ClusterSecret, timeout: float = TIMEOUT_SECONDS) -> None:
        """Connect, and prove that both ends have the secret. timeout: the longest time without an answer, in seconds.

        Raises OSError, and WrongSecretError if the other end does not have the secret.
        """
        self._port = port
        self._timeout = timeout
        self._is_interrupted = threading.Event()
        self._events_before = 0
        self._context = zmq.Context()  # one per connection, since a context's thread decrypts its data
        try:
            self._socket: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
            self._monitor: zmq.Socket[Any] = self._socket.get_monitor_socket(_EVENTS)
            secret.connect(self._socket, tcp_address(host, port), MOST_FRAME_BYTES)
        except zmq.ZMQError as error:  # such as too many open files
            self._context.destroy(linger=0)
            raise ConnectionError(error_text(error)) from error
        self._poller: Any = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._wait(lambda _: bool(self._events_before & zmq.EVENT_HANDSHAKE_SUCCEEDED))
        except BaseException:
            self.close()
            raise

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises ValueError if it is too long."""
        body = msgspec.msgpack.encode(message)
        if len(body) > MOST_FRAME_BYTES:
            raise ValueError(f"a message of {len(body):,} bytes is too long")
        self._socket.send(body)

    def receive(self, decoder: "msgspec.msgpack.Decoder[T]") -> T:
        """Return the next message. Raises OSError, and ValueError for an invalid message."""
        return decoder.decode(self._receive())

    def receive_data(self) -> Iterator[memoryview]:
        """Yield the frames with blocks that follow a message; the caller stops after the last one. Raises OSError."""
        while True:
            yield self._receive()

    def _receive(self) -> memoryview:
        self._wait(lambda ready: self._socket in ready)
        return self._socket.recv(copy=False).buffer

    def _wait(self, is_over: Callable[[dict[Any, int]], bool]) -> None:
        """Wait until `is_over` returns True for the readable sockets. Raises OSError."""
        ends = time.monotonic() + self._timeout
        while True:
            ready = dict(self._poller.poll(min(_TICK_MILLISECONDS, self._timeout * 1000)))
            if is_over(ready):
                return
            if self._monitor in ready:
                self._check(**recv_monitor_message(self._monitor))
            if self._is_interrupted.is_set():
                raise ConnectionAbortedError("the connection was closed")
            if time.monotonic() > ends:
                raise TimeoutError(f"timed out: there was no answer for {self._timeout:g} s")

    def _check(self, event: int, value: int, endpoint: bytes) -> None:
        """Raises OSError if the event ends the connection."""
        if event & zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == FULL:
            raise ConnectionRefusedError("it has as many connections as it may have")
        if event & _HAS_ENDED and not self._events_before & zmq.EVENT_CONNECTED:
            raise ConnectionRefusedError(f"the connection to port {self._port} was refused")
        if event & _HAS_ENDED and self._events_before & zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise ConnectionResetError("the other end has closed the connection")
        if event & (HANDSHAKE_FAILED | _HAS_ENDED):
            raise WrongSecretError("it has another cluster_secret_file, and has refused the connection")
        self._events_before |= event

    def interrupt(self) -> None:
        """Make running calls of other threads return soon."""
        self._is_interrupted.set()

    def close(self) -> None:
        self._context.destroy(linger=0)


def frames(pieces: Iterable[memoryview]) -> Iterator[bytes]:
    """Copy the pieces into frames, all of equal size except the last."""
    parts: list[memoryview] = []
    room = _FRAME_BYTES
    for piece in pieces:
        start = 0
        while start < len(piece):
            part = piece[start : start + room]
            parts.append(part)
            start += len(part)
            room -= len(part)
            if not room:
                yield b"".join(parts)
                parts = []
                room = _FRAME_BYTES
    if parts:
        yield b"".join(parts)


def fill(targets: Iterable[memoryview], data: Iterable[memoryview]) -> None:
    """Fill the targets in order with the data. Raises ValueError if there is too little data."""
    rest = iter(data)
    piece = memoryview(b"")
    for target in targets:
        start = 0
        while start < len(target):
            if not piece:
                piece = next(rest, memoryview(b""))
                if not piece:
                    raise ValueError("it has sent less than what was asked for")
            part = piece[: len(target) - start]
            target[start : start + len(part)] = part
            start += len(part)
            piece = piece[len(part) :]
