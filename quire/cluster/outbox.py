"""A queue for messages from any thread to the thread that owns a ZeroMQ socket."""

import threading
from typing import Any

import zmq

_names = iter(range(1 << 62))


class Outbox:
    """A queue whose receiving end, `socket`, can be polled together with the owning thread's other sockets."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        address = f"inproc://outbox-{next(_names)}"
        self.socket, self._entry = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for end in (self.socket, self._entry):
            end.set_hwm(0)
            end.linger = 0
        self.socket.bind(address)
        self._entry.connect(address)
        self._lock = threading.RLock()  # one thread at a time may use a socket; a signal handler may interrupt it
        self._is_open = True

    def put(self, name: bytes, body: bytes) -> None:
        """Add a message, unless the outbox is closed."""
        with self._lock:
            if self._is_open:
                self._entry.send_multipart([name, body])

    def close(self) -> bool:
        """Add a last message with an empty name. Later messages are lost. Returns False if the outbox was already
        closed."""
        with self._lock:
            was_open = self._is_open
            self._is_open = False
            if was_open:
                self._entry.send_multipart([b"", b""])
                self._entry.close(linger=-1)
            return was_open

    def get(self) -> tuple[bytes, bytes]:
        """Return the next message. The caller has polled `socket`."""
        name, body = self.socket.recv_multipart()
        return name, body
