"""`quire run-batch`: run the requests of a file through the server's application in this process, without sockets."""

import asyncio
import sys
from contextlib import nullcontext
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.types import Message
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from quire.config.engine import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_client import CoreClient
from quire.observability.logging import logger
from quire.server.app import create_app
from quire.server.batch_files import BatchFiles, BatchLine, custom_id, parse
from quire.server.draining import loop_factory
from quire.server.errors import ApiError
from quire.server.http_server import create_llm

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_QUEUE = 4  # requests in progress per request that can run at once


class _Body(msgspec.Struct):
    """The fields of a body that would split the response into several messages."""

    stream: Any = None
    background: Any = None


def run(core: CoreClient, config: ServerConfig, files: BatchFiles) -> None:
    """Run all requests that have no response yet. Raises ConfigError, OSError or EngineDeadError."""
    llm, names = create_llm(core, config)
    log = logging_redirect_tqdm(loggers=[logger]) if sys.stderr.isatty() else nullcontext()
    with asyncio.Runner(loop_factory=loop_factory()) as runner, log:
        runner.run(_run(llm, config, names, files))


async def _run(llm: AsyncLLM, config: ServerConfig, names: list[str], files: BatchFiles) -> None:
    app = create_app(llm, config, names)
    try:
        await llm.start()
        await _Batch(llm, app, config, files).run()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        app.state.responses.store.close()
        if app.state.tracing is not None:
            await app.state.tracing.close()
        await llm.shutdown()


class _Batch:
    """Requests of a batch in progress. Their number and the bytes of their lines are limited."""

    def __init__(self, llm: AsyncLLM, app: FastAPI, config: ServerConfig, files: BatchFiles) -> None:
        self._llm = llm
        self._app = app
        self._config = config
        self._files = files
        self._max_requests = _QUEUE * llm.config.scheduler.max_num_seqs * len(llm.config.layout.served)
        self._num_requests = self._num_bytes = 0
        self._ended = asyncio.Event()

    async def run(self) -> None:
        files = self._files
        if sys.stderr.isatty():
            style: dict[str, Any] = {"dynamic_ncols": True, "mininterval": 0.2}
        else:  # a line at a time, for log files
            layout = "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]\n"
            style = {"bar_format": layout, "mininterval": 10}
        num_answered = files.num_requests - files.num_unanswered
        with tqdm(desc="Requests", total=files.num_requests, initial=num_answered, unit="req", **style) as self._bar:
            async with asyncio.TaskGroup() as tasks:
                for number, line in files.unanswered():
                    size = len(line or b"")
                    while self._num_requests and (
                        self._num_requests >= self._max_requests
                        or self._num_bytes + size > self._config.max_total_body_bytes
                    ):
                        self._ended.clear()
                        await self._ended.wait()
                    self._num_requests += 1
                    self._num_bytes += size
                    tasks.create_task(self._answer(number, line))

    async def _answer(self, number: int, line: bytes | None) -> None:
        """Run a request and write its response, unless the engine has failed permanently."""
        request = parse(line)
        try:
            if line is None:
                limit = self._config.max_body_bytes
                raise ApiError(413, f"the line has more than {limit} bytes", code="body_too_large")
            body, url = _checked(request)
            status, request_id, answer = await self._post(url, body, number)
        except ApiError as refused:
            status = refused.status_code
            request_id = None
            answer = msgspec.json.encode(refused.body(""))
        self._llm.client.check()
        error = None if status < 400 else msgspec.json.decode(answer)["error"]
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(answer)}
        self._files.write(number, {"custom_id": custom_id(request), "response": response, "error": error})
        if error is not None:
            self._bar.set_postfix_str(f"{self._files.num_failed} with an error", refresh=False)
        self._bar.update()
        self._num_requests -= 1
        self._num_bytes -= len(line or b"")
        self._ended.set()

    async def _post(self, url: str, body: bytes, number: int) -> tuple[int, str, bytes]:
        """Return (status, request id, body) of the application's response. number: the line's number, for the log."""
        messages: list[Message] = [{"type": "http.request", "body": body}]
        status = 0
        headers = {}
        parts = []

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()  # a batch never disconnects
            return messages.pop()

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message["headers"])
            else:
                parts.append(message.get("body", b""))

        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "client": ("line", number),
            "server": None,
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
            "state": {},
        }
        await self._app(scope, receive, send)
        return status, headers[b"x-request-id"].decode(), b"".join(parts)


def _checked(request: BatchLine | None) -> tuple[bytes, str]:
    """Return (body, url) of a request. Raises ApiError."""
    if request is None:
        raise ApiError(400, "the line is not a JSON object", code="invalid_json")
    if not isinstance(request.custom_id, str):
        raise ApiError(400, "custom_id should be a string", param="custom_id")
    if request.method != "POST":
        raise ApiError(400, 'method should be "POST"', param="method")
    if request.url not in URLS:
        raise ApiError(400, f"url should be one of {', '.join(URLS)}", param="url")
    body = bytes(request.body)
    for name in ("stream", "background"):
        if getattr(_fields(body), name):
            raise ApiError(400, f"{name} is not allowed in a batch", param=f"body.{name}")
    return body, str(request.url)


def _fields(body: bytes) -> _Body:
    try:
        return msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Body()  # the application will report the error
