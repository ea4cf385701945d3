"""Ends the sleep of the core's loop."""

import contextlib
import select
import socket


class WakeUp:
    """A flag that any thread may set, and that one thread can wait for, alone or together with other files."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def set(self) -> None:
        with contextlib.suppress(OSError):  # so many bytes are there that no more fit, or it has been closed
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wait(self) -> None:
        select.select([self._reader], [], [])

    def fileno(self) -> int:
        """Can be read while the flag is set."""
        return self._reader.fileno()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
