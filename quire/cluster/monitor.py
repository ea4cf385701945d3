"""Connections that failed before the peer proved knowledge of the secret."""

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
    """The failed handshakes of a socket. Its own `socket` is readable after a failure. least: the number of failures
    after which a line is logged."""

    _events = HANDSHAKE_FAILED

    def __init__(self, watched: "zmq.Socket[Any]", least: int = 1) -> None:
        self._watched = watched
        self._least = least
        self._count = 0
        self.socket: zmq.Socket[Any] = watched.get_monitor_socket(self._events)
        self.socket.linger = 0
        self._logged_at = float("-inf")

    def report(self, text: str, *details: object) -> None:
        """Write a line to the log for the failures since the last call, but not too often."""
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
    """The connections of a socket that listens, those included that have not proven to know the secret, and its failed
    handshakes. Its own `socket` is readable when either has changed."""

    _events = HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

    def __init__(self, watched: "zmq.Socket[Any]") -> None:
        super().__init__(watched)
        self._open: set[int] = set()  # file descriptors

    @property
    def count(self) -> int:
        """As of the last report."""
        return len(self._open)

    def _is_failure(self, event: int, value: int) -> bool:
        if event == zmq.EVENT_ACCEPTED:
            self._open.add(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._open.discard(value)
        else:
            return value != FULL  # such a client knows the secret
        return False
