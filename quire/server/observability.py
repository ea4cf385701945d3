"""Gives every HTTP request an id, a log line, metrics with vLLM's names and, if enabled, a span.

vLLM's metrics come from prometheus-fastapi-instrumentator. This is plain ASGI, so that a stream's chunks are only
counted, without a copy or an additional task.
"""

import asyncio
import re
import time
import tomllib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    Summary,
    generate_latest,
)
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.observability.exposition import are_shared, exposition
from quire.server.errors import ApiError, api_error, error_response, path_in
from quire.server.middleware import header
from quire.server.request_log import RequestLog
from quire.server.tracing import RequestTrace

if TYPE_CHECKING:
    from quire.server.spans import Tracing

PROBES = ("/health", "/ping", "/version", "/metrics", "/load")  # as in vLLM, not in the HTTP metrics
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
_KINDS: dict[str, type[Any]] = {"counter": Counter, "histogram": Histogram, "summary": Summary}


class HttpMetrics:
    """Counts requests with their times and sizes. Also reports on this process's Python.

    processes: the metrics of all processes of the server.
    """

    def __init__(self, processes: Collector) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        self._processes = CollectorRegistry()
        self._processes.register(processes)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        for name, options in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
            kind = _KINDS[options.pop("kind")]
            labels = options.pop("labels")
            self._metrics[name] = kind(name, labelnames=labels, registry=self.registry, **options)

    def count(self, handler: str, method: str, status: int, seconds: float, received: int, sent: int) -> None:
        """handler: the route's path, or "none" without a route. The request's path would give an unlimited number of
        labels."""
        method = method if method in _METHODS else "other"
        self._metrics["http_requests_total"].labels(handler, method, f"{status // 100}xx").inc()
        self._metrics["http_request_duration_seconds"].labels(handler, method).observe(seconds)
        self._metrics["http_request_duration_highr_seconds"].observe(seconds)
        self._metrics["http_request_size_bytes"].labels(handler).observe(received)
        self._metrics["http_response_size_bytes"].labels(handler).observe(sent)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format. Counts of several API processes are part of the engine's
        metrics."""
        return (b"" if are_shared() else exposition(self.registry)) + generate_latest(self._processes)


class _Exchange:
    """A request and its response, while the response is sent."""

    def __init__(self, send: Send, *headers: tuple[bytes, bytes]) -> None:
        """headers: added to the response."""
        self._send = send
        self._headers = headers
        self.status = self.num_bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.num_bytes += len(message.get("body", b""))
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)


class Observability:
    """The outermost middleware. Gives each request its id, from X-Request-Id or a new one, and records how it ends.

    routes: the routes whose paths metrics and spans show. tracing: None for no spans.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        log: RequestLog,
        routes: Sequence[BaseRoute],
        tracing: "Tracing | None",
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.log = log
        self.tracing = tracing
        self.routes = [route for route in routes if isinstance(route, Route)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        given = header(scope, b"x-request-id")
        valid = given is None or _REQUEST_ID.fullmatch(given) is not None
        request_id = given if given is not None and valid else uuid.uuid4().hex.encode()
        state = scope.setdefault("state", {})
        state |= {"began": began, "request_id": request_id.decode(), "request_id_given": given is not None}
        message = "X-Request-Id should be 1 to 128 visible ASCII characters"
        app = self.app if valid else error_response(ApiError(400, message, param="X-Request-Id"), scope)
        headers = [(b"x-request-id", request_id)]
        route = self._route(path_in(scope))
        span = None if self.tracing is None else self.tracing.begin(scope, path_in(scope), route)
        if span is not None:
            headers.append(span.response_header)
            if span.is_recorded:
                state["trace"] = RequestTrace(span, route, request_id.decode())
        exchange = _Exchange(send, *headers)
        try:
            try:
                await app(scope, receive, exchange.send)
            except asyncio.CancelledError:
                exchange.status = exchange.status or 499  # the client disconnected
                raise
            except Exception as error:
                if exchange.status:
                    raise  # the response has started, so no error can be sent
                await error_response(api_error(error), scope)(scope, receive, exchange.send)
        finally:
            self._ended(scope, exchange, route, time.monotonic() - began)

    def _route(self, path: str) -> str | None:
        return next((route.path for route in self.routes if route.path_regex.match(path)), None)

    def _ended(self, scope: Scope, exchange: _Exchange, route: str | None, seconds: float) -> None:
        path = path_in(scope)
        if path not in PROBES:
            length = header(scope, b"content-length") or b"0"
            received = int(length[:20]) if length.isdigit() else 0
            status = exchange.status or 500
            self.metrics.count(route or "none", scope["method"], status, seconds, received, exchange.num_bytes)
        self.log.ended(scope, exchange.status, exchange.num_bytes)
