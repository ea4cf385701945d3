"""Spans for OpenTelemetry, sent by OTLP.

Only `begin_tracing` imports this file, since it needs the extra `otel`. Requests carry their context in the headers
`traceparent` and `tracestate` (W3C Trace Context), and answers in `traceresponse` (level 2 of that document).
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from quire._version import __version__
from quire.config.engine import ConfigError
from quire.observability.logging import logger

FLUSH_SECONDS = 5.0  # how long the process may wait at exit to send remaining spans
MOST_CHARACTERS = 500  # of text from a client
_REPEAT_SECONDS = 60.0  # the same problem is logged at most once in this time
_PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
_CONTEXT = ("traceparent", "tracestate")
_CONTEXT_OF_W3C = TraceContextTextMapPropagator()


class ServerSpan:
    """The span of an incoming request. response_header: the response header that names it."""

    def __init__(self, tracer: Any, span: Span, began: int) -> None:
        """began: by time.monotonic_ns()."""
        self._tracer = tracer
        self._span = span
        self._offset = time.time_ns() - time.monotonic_ns()  # to the wall clock, which spans use
        self._began = began
        self._context = set_span_in_context(span)
        context = span.get_span_context()
        value = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        self.response_header = b"traceresponse", value.encode()

    @property
    def is_recorded(self) -> bool:
        return self._span.is_recording()

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Attributes that are None are left out."""
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def add_event(self, name: str, attributes: Mapping[str, Any]) -> None:
        self._span.add_event(name, dict(attributes))

    def add_child(self, name: str, began: float, ended: float, attributes: Mapping[str, Any]) -> None:
        """Add a finished part of the request. began, ended: by time.monotonic()."""
        start = self._wall(began)
        child = self._tracer.start_span(name, self._context, attributes=dict(attributes), start_time=start)
        child.end(max(start, self._wall(ended)))

    def begin_call(self, name: str, attributes: Mapping[str, Any]) -> "CallSpan":
        """Begin the span of a request to another server."""
        span = self._tracer.start_span(name, self._context, SpanKind.CLIENT, dict(attributes))
        return CallSpan(span)

    def end(self, error_type: str | None = None, message: str | None = None, is_ours: bool = False) -> None:
        """is_ours: whether the server caused the error, not the client."""
        if error_type is not None:
            self._span.set_attribute("error.type", error_type)
        if is_ours:
            self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()

    def _wall(self, seconds: float) -> int:
        return int(1e9 * seconds) + self._offset


class CallSpan:
    """A running request to another server. context: the headers that pass the span to the other server."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.context: dict[str, str] = {}
        _CONTEXT_OF_W3C.inject(self.context, set_span_in_context(span))

    def end(self, status: int | None = None, error_type: str | None = None) -> None:
        """status: the response status, if there was a response."""
        if self._span.is_recording():
            if status is not None:
                self._span.set_attribute("http.response.status_code", status)
                error_type = error_type or (str(status) if status >= 400 else None)
            if error_type is not None:
                self._span.set_attribute("error.type", error_type)
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class Tracing:
    """Creates spans, and sends them in its own thread. Spans that cannot be sent are dropped."""

    def __init__(self, endpoint: str, service: str, ignored: Callable[[str], bool] = lambda path: False) -> None:
        """service: the service name, unless the environment sets another. ignored: whether a path has no spans.

        Raises ConfigError for an address or a protocol that cannot be used.
        """
        self._ignored = ignored
        exporter = _exporter(endpoint)
        _report_problems()
        resource = Resource.create({SERVICE_VERSION: __version__, "process.pid": os.getpid()})
        if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        self._processor = BatchSpanProcessor(exporter)
        # OTEL_TRACES_SAMPLER selects the sampler. By default, the flag of `traceparent` decides; without this header,
        # all requests are recorded.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("quire", __version__)

    def begin(self, scope: Scope, path: str, route: str | None) -> ServerSpan | None:
        """Begin the span of a request. Returns None if its path has none, or if OTEL_SDK_DISABLED is set.

        path: without the server's root path. route: the route's path, in which variable parts have names.
        """
        if self._ignored(path):
            return None
        began = time.monotonic_ns()
        method = scope["method"]
        name = method if route is None else f"{method} {route}"
        span = self._tracer.start_span(name, _context_of(scope), SpanKind.SERVER)
        if not span.get_span_context().is_valid:
            return None
        found = ServerSpan(self._tracer, span, began)
        if found.is_recorded:
            client = scope.get("client")
            server = scope.get("server")
            headers = dict(scope["headers"])
            agent = headers.get(b"user-agent")
            found.set(
                {
                    "http.request.method": method,
                    "http.route": route,
                    "url.path": path[:MOST_CHARACTERS],
                    "url.scheme": scope["scheme"],
                    "network.protocol.version": scope["http_version"],
                    "client.address": client[0] if client else None,
                    "server.address": server[0] if server else None,
                    "server.port": server[1] if server else None,
                    "user_agent.original": None if agent is None else agent[:MOST_CHARACTERS].decode("latin-1"),
                }
            )
        return found

    async def close(self) -> None:
        """Send the remaining spans. After FLUSH_SECONDS, the rest is lost."""
        # A daemon thread, since a thread of the event loop would delay the end of the process.
        flush = threading.Thread(target=self._processor.shutdown, name="flush spans", daemon=True)
        flush.start()
        end = time.monotonic() + FLUSH_SECONDS
        while flush.is_alive():
            if time.monotonic() > end:
                logger.warning("Traces: the last spans could not be sent within %g s", FLUSH_SECONDS)
                return
            await asyncio.sleep(0.01)


def _exporter(endpoint: str) -> SpanExporter:
    """Return the OTLP exporter for an address. Raises ConfigError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https", "grpc") or not parts.netloc:
        raise ConfigError(f"otlp_traces_endpoint must be a URL such as http://127.0.0.1:4317, got {endpoint!r}")
    name = next((name for name in _PROTOCOLS if os.environ.get(name)), None)
    protocol = "grpc" if name is None else os.environ[name]
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint.replace("grpc://", "http://", 1))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces")
    raise ConfigError(f"{name} must be grpc or http/protobuf, got {protocol!r}")


def _context_of(scope: Scope) -> Any:
    """Return the context of a request that is part of a trace, or an empty one."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        text = name.decode("latin-1")
        if text in _CONTEXT:  # `tracestate` may be split over several headers
            found[text] = f"{found[text]},{value.decode('latin-1')}" if text in found else value.decode("latin-1")
    return _CONTEXT_OF_W3C.extract(found)


class _Reports(logging.Handler):
    """Forwards the libraries' problems to Quire's log: at most one line of each kind per minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        kind = str(record.msg)
        if now - self._last.get(kind, -_REPEAT_SECONDS) >= _REPEAT_SECONDS:
            self._last[kind] = now
            logger.warning("Traces: %s", record.getMessage())


def _report_problems() -> None:
    of_library = logging.getLogger("opentelemetry")
    of_library.handlers = [_Reports()]
    of_library.propagate = False
