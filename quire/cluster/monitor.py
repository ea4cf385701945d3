"""Connections that failed before the peer proved knowledge of the secret."""

import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.observability.logging import logger

_REPEAT_SECONDS = 10.0  # between two log lines
_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class FailedHandshakes:
    """The failed handshakes of a socket. Its own `socket` is readable after a failure. least: the number of failures
    after which a line is logged."""

    def __init__(self, watched: "zmq.Socket[Any]", least: int = 1) -> None:
        self._watched = watched
        self._least = least
        self._count = 0
        self.socket: zmq.Socket[Any] = watched.get_monitor_socket(_EVENTS)
        self.socket.linger = 0
        self._logged_at = float("-inf")

    def report(self, text: str, *details: object) -> None:
        """Log a line about the failures since the last call, with a rate limit."""
        while self.socket.poll(0):
            recv_monitor_message(self.socket)
            self._count += 1
        now = time.monotonic()
        if self._count >= self._least and now - self._logged_at >= _REPEAT_SECONDS:
            self._logged_at = now
            logger.warning(text, *details)

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close()
