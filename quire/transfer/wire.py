"""Connections between ranks of different engines: ZeroMQ with CURVE, whose keys come from the cluster's secret.

Only peers with the secret can ask for blocks, and everything is encrypted and authenticated, the bytes of blocks too. A
message is a frame with a msgpack structure. Frames with the bytes of blocks may follow it.

An executor and its ranks use `quire.executor.link` instead: once both have proved that they know the engine's key,
they believe what arrives.
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
_FRAME_BYTES = 256 << 10  # of blocks; ZeroMQ takes long to allocate larger frames
_TICK_MILLISECONDS = 100  # within which an interruption is noticed
_HAS_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED | _HAS_ENDED

T = TypeVar("T")


class WrongSecretError(ConnectionError):
    """The other end does not have the secret."""


class Connection:
    """The client's end of a connection, which one thread at a time uses. It ends with the first failure."""

    def __init__(self, host: str, port: int, secret: ClusterSecret, timeout: float = TIMEOUT_SECONDS) -> None:
        """Connect, and prove that both ends have the secret. timeout: the longest time without an answer, in seconds.

        Raises OSError, and WrongSecretError if the other end does not have the secret.
        """
        self._port = port
        self._timeout = timeout
        self._is_interrupted = threading.Event()
        self._events_before = 0
        self._context = zmq.Context()  # of its own, since a context's thread decrypts what arrives
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
        """Raises ValueError for a message that is too long."""
        body = msgspec.msgpack.encode(message)
        if len(body) > MOST_FRAME_BYTES:
            raise ValueError(f"a message of {len(body):,} bytes is too long")
        self._socket.send(body)

    def receive(self, decoder: "msgspec.msgpack.Decoder[T]") -> T:
        """The next message. Raises OSError, and ValueError for a message that no honest peer sends."""
        return decoder.decode(self._receive())

    def receive_data(self) -> Iterator[memoryview]:
        """The bytes of blocks that follow a message, frame by frame, for as long as the caller asks. Raises OSError."""
        while True:
            yield self._receive()

    def _receive(self) -> memoryview:
        self._wait(lambda ready: self._socket in ready)
        return self._socket.recv(copy=False).buffer

    def _wait(self, is_over: Callable[[dict[Any, int]], bool]) -> None:
        """Wait until `is_over`, which is given the sockets that can be read. Raises OSError."""
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
        """Have calls of other threads end soon."""
        self._is_interrupted.set()

    def close(self) -> None:
        self._context.destroy(linger=0)


def frames(pieces: Iterable[memoryview]) -> Iterator[bytes]:
    """A copy of the pieces, in frames of equal size but for the last one."""
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
    """Fill the targets with the data, in their order. Raises ValueError if there is too little of it."""
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
