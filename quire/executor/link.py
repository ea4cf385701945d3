"""The connection between the executor and one of its ranks: messages of bytes over TCP.

A rank connects to the address at which the executor listens. Then each side proves that it knows the same key.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from typing import Self

_GREETING_SECONDS = 5.0  # time within which a peer that connects must prove that it knows the key
_KEY_BYTES = 32
_LENGTH = struct.Struct("!Q")  # sent before each message: its length in bytes


class Link:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connected: socket.socket, key: bytes, role: bytes) -> None:
        """role: of this end, b"executor" or b"rank". Raises OSError (ConnectionError for a wrong key) if the other end
        does not prove in time that it knows the key."""
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
        """Return the next message. Raises OSError if the other end has closed the connection, or if the message has
        more than `longest` bytes."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if longest is not None and length > longest:
            raise ConnectionError("a message is too long")
        return self._read(length)

    def is_closed(self) -> bool:
        """Whether the other end has closed the connection. Drops any unread messages."""
        try:
            while self._socket.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

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
