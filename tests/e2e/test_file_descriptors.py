"""More connections than the limit of open files seems to allow."""

from __future__ import annotations

import resource
import socket

import pytest

from support.server import eventually
from support.server_process import Server
from support.waiting import LONGEST

CONNECTIONS = 100
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(server: Server) -> list[socket.socket]:
    """Connections that are all open at once, each with a request on its way."""
    connections = [socket.create_connection(server.host_and_port) for _ in range(CONNECTIONS)]
    for connection in connections:
        connection.sendall(HEALTH)
    return connections


@pytest.mark.slow
def test_the_soft_limit_is_raised_to_the_hard_one():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Server(files=(64, hard)) as server:
        connections = connect(server)
        for connection in connections:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        for connection in connections:
            connection.close()
        log = server.log
    assert "connections wait" not in log


@pytest.mark.slow
def test_connections_beyond_the_hard_limit_wait_and_are_not_lost():
    with Server(files=(64, 64)) as server:
        assert "The limit of open files is small: 64" in server.log
        connections = connect(server)
        message = "New connections wait: the limit of open files (64) is reached"
        eventually(lambda: message in server.log)
        for connection in connections:  # each that is closed makes room for another
            connection.settimeout(LONGEST)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            connection.close()
        assert server.log.count(message) == 1
        assert server.get("/health")[0] == 200
