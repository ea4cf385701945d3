"""Receivers of OTLP, which decode the official protobufs: a gRPC server and an HTTP server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from support.server import eventually

# So that tests need not wait for spans. The SDK reads it when it starts.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}


@dataclass
class Span:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    start: int
    end: int
    status: str
    message: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind)


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


@dataclass
class Receiver:
    """endpoint: its URL. spans: all that have come."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            about = attributes_of(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_span(span, about) for span in scope.spans]

    def of(self, trace_id: str, count: int = 1) -> list[Span]:
        """The spans of a trace, by their start, when there are so many."""
        eventually(lambda: len([s for s in list(self.spans) if s.trace_id == trace_id]) >= count)
        return sorted((s for s in list(self.spans) if s.trace_id == trace_id), key=lambda s: s.start)


def _span(span: SpanMessage, resource: dict[str, Any]) -> Span:
    kind = SpanMessage.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")
    status = ("UNSET", "OK", "ERROR")[span.status.code]
    events = [(event.name, attributes_of(event.attributes)) for event in span.events]
    return Span(
        span.name,
        kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        status,
        span.status.message,
        attributes_of(span.attributes),
        resource,
        events,
    )


@contextmanager
def grpc_receiver(port: int = 0) -> Iterator[Receiver]:
    receiver = Receiver()

    class Servicer(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
            receiver.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)
    receiver.endpoint = f"grpc://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            if known:
                receiver.take(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
