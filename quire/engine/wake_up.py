"""Ends the sleep of the core's loop."""

import contextlib
import select
import socket


class WakeUp:
    """A flag that any thread may set. One thread can wait for it, also together with other files (through `fileno`)."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._was_set = False  # saves `clear` a system call in each step

    def set(self) -> None:
        with contextlib.suppress(OSError):  # the socket's buffer is full (so the flag is set), or it has been closed
            self._writer.send(b"\0")
        self._was_set = True  # set last, so that a concurrent `clear` leaves the byte to a later one

    def clear(self) -> None:
        if not self._was_set:
            return
        self._was_set = False
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, but no longer than `seconds`. Returns whether it is set."""
        return bool(select.select([self._reader], [], [], seconds)[0])

    def fileno(self) -> int:
        """Return the descriptor of a file that is readable while the flag is set."""
        return self._reader.fileno()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
