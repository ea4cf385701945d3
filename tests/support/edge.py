"""A small application behind the server's own HTTP edge, in a thread, and raw connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.config.engine import ServerConfig
from quire.server.connections import limited_protocol
from quire.server.draining import DrainingServer
from support.waiting import LONGEST, eventually


class Edge(DrainingServer):
    """A server of an application that answers `ok`, without a look at the body, unless the path says otherwise.

    /read answers with the size of the body. /wait answers when `go` is set. /stream answers with a stream of events.
    """

    def __init__(self, config: ServerConfig, go: asyncio.Event) -> None:
        super().__init__(self._answer, config, lambda url: None, interface="asgi3")
        self.go = go
        self.received = 0

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        text = b"ok"
        self.received += 1
        if scope["path"] == "/wait":
            await self.go.wait()
        elif scope["path"] == "/read":
            size, more = 0, True
            while more:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
            text = str(size).encode()
        elif scope["path"] == "/stream":
            await _stream(send)
            return
        headers = [(b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    def count_running(self) -> int:
        return 0

    def end_running(self) -> None:
        self.go.set()


async def _stream(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for data in ["a"] * 20 + ["[DONE]"]:
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
        await asyncio.sleep(0.005)
    await send({"type": "http.response.body", "body": b""})


class EdgeHost:
    """The edge in a thread. port: where it listens. connections: how many are open."""

    def __init__(self, parser: str = "auto", **options: Any) -> None:
        """parser: httptools or h11."""
        self._loop = asyncio.new_event_loop()
        self._config, self._parser = ServerConfig.create(**options), parser
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: getattr(getattr(self, "edge", None), "started", False))

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self.edge = Edge(self._config, asyncio.Event())
        self.edge.config.http = limited_protocol(self._config, self._parser)
        await self.edge.serve([self._listening])

    @property
    def connections(self) -> int:
        return len(self.edge.server_state.connections)

    def let_go(self) -> None:
        self._loop.call_soon_threadsafe(self.edge.go.set)

    @contextmanager
    def connection(self, data: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=LONGEST) as raw:
            if data:
                raw.sendall(data)
            yield raw

    def close(self) -> None:
        self.edge.should_exit = self.edge.force_exit = True
        self._thread.join(LONGEST)
        self._loop.close()


def until_closed(raw: socket.socket) -> bytes:
    """All that comes until the other side closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(1 << 16):
            data += piece
    return data


def send_until_closed(raw: socket.socket, piece: bytes, most: int) -> int:
    """Send a piece again and again, at most `most` bytes. Returns how many could be sent."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            raw.sendall(piece)
            sent += len(piece)
    return sent


def answered(raw: socket.socket) -> tuple[int, bytes]:
    """The status and the body of the next answer."""
    with raw.makefile("rb") as stream:
        head = b"".join(iter(stream.readline, b"\r\n"))
        size = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        return int(head.split()[1]), stream.read(int(size.split(b":")[1]))
