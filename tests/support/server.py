"""A server in a thread of this process, with one engine and any number of applications, and an HTTP client."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from quire.config.engine import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.server.app import create_app
from support.waiting import LONGEST
from support.waiting import eventually as eventually


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error. Raises if the answer is not an error in OpenAI's format."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, which must end with [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass
class Client:
    """A client of the server at a port."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        return request(self.url, method, path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def post(self, path: str, content: Any, **headers: str) -> Answer:
        return self.request(
            "POST", path, json.dumps(content).encode(), **{"Content-Type": "application/json"} | headers
        )

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """The answer of /v1/completions, greedy by default."""
        answer = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert answer.status == 200, answer.body
        return answer.events if fields.get("stream") else answer.json

    def chat(self, content: Any, **fields: Any) -> Any:
        """The answer of /v1/chat/completions to a message."""
        messages = [{"role": "user", "content": content}]
        answer = self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})
        assert answer.status == 200, answer.body
        return answer.events if fields.get("stream") else answer.json

    def metric(self, name: str) -> float:
        text = self.get("/metrics").body.decode()
        return float(re.search(rf"^quire:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[1])

    @contextmanager
    def connection(self, path: str, content: Any, receive_buffer: int = 0) -> Iterator[socket.socket]:
        """A raw connection, on which the request has been sent."""
        body = json.dumps(content).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as raw:
            if receive_buffer:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            raw.connect(("127.0.0.1", self.port))
            raw.settimeout(LONGEST)
            raw.sendall(head.encode() + body)
            yield raw


@dataclass
class Service(Client):
    """A running application."""

    app: FastAPI


def request(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=LONGEST)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


class Host:
    """An engine and an event loop in a thread."""

    def __init__(self, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._thread.start()
        self._servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
        self.llm: AsyncLLM = self.run(self._start(options))

    async def _start(self, options: dict[str, Any]) -> AsyncLLM:
        llm = AsyncLLM(**options)
        await llm.start()
        return llm

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LONGEST)

    def serve(self, send_buffer: int = 0, **options: Any) -> Service:
        """send_buffer: bytes that Linux buffers for a connection. options: of ServerConfig."""
        config = ServerConfig.create(**options)
        app = create_app(self.llm, config, config.served_model_name or ["demo"])
        listening = socket.create_server(("127.0.0.1", 0))
        if send_buffer:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.run(self._serve(app, listening))
        return Service(listening.getsockname()[1], app)

    async def _serve(self, app: FastAPI, listening: socket.socket) -> None:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.create_task(server.serve([listening]))
        self._servers.append((server, serving))
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.01)

    def post_until_time_is_up(self, path: str, body: dict[str, Any], **options: Any) -> Answer:
        """The answer to a streamed request that times out within the stream, on a machine of any speed."""
        for seconds in (0.3, 1, 3, 9, 27, 81, 243):
            answer = self.serve(request_timeout=seconds, **options).post(path, {**body, "stream": True})
            if answer.status == 200:
                break
        return answer

    @property
    def is_idle(self) -> bool:
        """Whether the core holds no requests and no blocks, by its last report."""
        client = self.llm.client
        return client.num_unfinished == 0 and client.stats.num_running == 0 and client.stats.kv_cache_usage == 0

    def close(self) -> None:
        for server, _ in self._servers:
            server.should_exit = server.force_exit = True
        if self._servers:
            self.run(asyncio.wait([serving for _, serving in self._servers]))
        self.run(self.llm.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
