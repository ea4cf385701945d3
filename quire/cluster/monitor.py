"""Monitors sockets for connections that fail before the peer has proved that it knows the secret."""

import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.cluster.secret import FULL
from quire.observability.logging import logger

_REPEAT_SECONDS = 10.0  # between two log lines
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class FailedHandshakes:
    """Logs failed handshakes of a socket. `socket` becomes readable after a failure. least: the number of failures
    before the first line is logged."""

    _events = HANDSHAKE_FAILED

    def __init__(self, watched: "zmq.Socket[Any]", least: int = 1) -> None:
        self._watched = watched
        self._least = least
        self._count = 0
        self.socket: zmq.Socket[Any] = watched.get_monitor_socket(self._events)
        self.socket.linger = 0
        self._logged_at = float("-inf")

    def report(self, text: str, *details: object) -> None:
        """Log a warning if handshakes have failed since the last call, at most once in _REPEAT_SECONDS."""
        count_before = self._count
        while self.socket.poll(0):
            message = recv_monitor_message(self.socket)
            self._count += self._is_failure(message["event"], message["value"])
        now = time.monotonic()
        if count_before < self._count >= self._least and now - self._logged_at >= _REPEAT_SECONDS:
            self._logged_at = now
            logger.warning(text, *details)

    def _is_failure(self, event: int, value: int) -> bool:
        return True

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close()


class Connections(FailedHandshakes):
    """Counts the connections of a listening socket, including those still in their handshake, and logs failed
    handshakes. `socket` becomes readable after each change."""

    _events = HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

    def __init__(self, watched: "zmq.Socket[Any]") -> None:
        super().__init__(watched)
        self._open: set[int] = set()  # file descriptors

    @property
    def count(self) -> int:
        """The number of open connections at the last `report`."""
        return len(self._open)

    def _is_failure(self, event: int, value: int) -> bool:
        if event == zmq.EVENT_ACCEPTED:
            self._open.add(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._open.discard(value)
        else:
            return value != FULL  # such a client knows the secret
        return False
