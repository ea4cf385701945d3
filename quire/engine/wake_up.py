"""Ends the sleep of the core's loop."""

import contextlib
import select
import socket


class WakeUp:
    """A flag that any thread may set. One thread can wait for it, also together with other files (by `fileno`)."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def set(self) -> None:
        with contextlib.suppress(OSError):  # the socket's buffer is full (so the flag is set), or it has been closed
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wait(self) -> None:
        select.select([self._reader], [], [])

    def fileno(self) -> int:
        """The descriptor of a file that is readable while the flag is set."""
        return self._reader.fileno()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
