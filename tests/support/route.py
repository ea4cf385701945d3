"""`quire route` in a process of its own, and servers that do what a test says."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.server import Answer, request
from support.server_process import Server
from support.waiting import LONGEST, eventually


class Proxy(Server):
    """`quire route` on a free port, in front of the servers with these URLs."""

    command, ready_line = "route", r"Routing at (\S+): "

    def __init__(self, *backends: str, options: tuple[str, ...] = ()) -> None:
        # Checks are frequent, so that no test has to wait, and as patient as a busy machine needs.
        super().__init__("--health-check-interval", "0.1", *options, "--backend", *backends)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        return request(self.url, method, path, body, **headers)

    def post(self, path: str, content: Any, **headers: str) -> Answer:
        return self.request("POST", path, json.dumps(content).encode(), Content_Type="application/json", **headers)

    def counted(self, name: str, **labels: str) -> float:
        """The sum of a metric over all labels but those given."""
        lines = re.findall(rf"^quire_route_{name}(?:{{(.*)}})? (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for found, value in lines if all(label in found for label in wanted))

    def wait_for_backends(self, count: int) -> None:
        eventually(lambda: self.counted("backend_up") == count, lambda: self.log)


@dataclass
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class SimulatedGpu(ThreadingHTTPServer):
    """A server that is healthy, and answers every request with its name until it is told otherwise.

    models: the names that /v1/models lists, if any. received: the requests, without those for /health, /load and this
    list. reply: answers one. responds: is cleared while even
    /health is not answered.
    """

    daemon_threads, request_queue_size = True, 128

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.received: list[Received] = []
        self.models: tuple[str, ...] = ()
        self.health, self.load = 200, 0
        self.responds = threading.Event()
        self.responds.set()
        self.reply: Callable[[_Handler], None] = lambda handler: handler.send(self.url.encode())
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._open.append(connection)
        return connection, address

    def refuse(self) -> None:
        """Accept no connections from now on."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def stop(self) -> None:
        """Also close all connections."""
        self.refuse()
        self.responds.set()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break in many of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SimulatedGpu

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.responds.wait(LONGEST)
        if self.path == "/health":
            self.send(b"", self.server.health)
        elif self.path == "/load":
            self.send(json.dumps({"server_load": self.server.load}).encode())
        elif self.path == "/v1/models" and self.server.models:
            entries = [{"id": name, "object": "model"} for name in self.server.models]
            self.send(json.dumps({"object": "list", "data": entries}).encode())
        else:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.server.received.append(Received(self.command, self.path, headers, body))
            self.server.reply(self)

    do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = _any  # noqa: N815

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Length": str(len(body)), **named}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def begin_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_chunk(self, chunk: bytes) -> None:
        """Send a part of the body; an empty one ends it."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))

    def cut(self) -> None:
        """Close the connection."""
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def stand_ins(count: int) -> Iterator[list[SimulatedGpu]]:
    servers = [SimulatedGpu() for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
