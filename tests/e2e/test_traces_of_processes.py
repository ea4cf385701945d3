"""Traces of whole processes: what is sent when they end, through the proxy, and without a collector."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.otlp import SOON, grpc_receiver, http_receiver
from support.route import Proxy
from support.server import request
from support.server_process import Server
from support.waiting import eventually

pytestmark = pytest.mark.slow

OPTIONS = ("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "16")
LATE = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}  # nothing is sent before the end
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BODY = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def complete(url: str, body: object = BODY, **headers: str):
    return request(
        url, "POST", "/v1/completions", json.dumps(body).encode(), Content_Type="application/json", **headers
    )


@pytest.mark.nightly
def test_the_end_of_a_server_sends_what_is_left():
    with grpc_receiver() as receiver:
        with Server(*OPTIONS, "--otlp-traces-endpoint", receiver.endpoint, **LATE) as server:
            for _ in range(3):
                assert complete(server.url).status == 200
            assert receiver.spans == []
            assert server.stop() == 0
        assert len(receiver.spans) == 12


@pytest.mark.nightly
def test_requests_that_the_end_interrupts_have_their_spans():
    with grpc_receiver() as receiver, ThreadPoolExecutor(1) as pool:
        options = ("--otlp-traces-endpoint", receiver.endpoint, "--drain-timeout", "0")
        with Server(*OPTIONS, *options, **LATE) as server:
            running = pool.submit(complete, server.url, {**BODY, "max_tokens": 1900, "stream": True})
            eventually(lambda: server.metric("generation_tokens_total"))
            assert server.stop() == 0
        running.result()
        (span,) = (span for span in receiver.spans if span.kind == "SERVER")
        assert (span.status, span.attributes["error.type"]) == ("ERROR", "shutting_down")
        assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_several_api_processes_send_their_spans():
    with http_receiver() as receiver:
        options = ("--otlp-traces-endpoint", receiver.endpoint, "--api-server-count", "2")
        with Server(*OPTIONS, *options, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf", **LATE) as server:
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda _: complete(server.url), range(16)))
            assert server.stop() == 0
        named = {answer.headers["traceresponse"].split("-")[2] for answer in answers}
        assert {span.span_id for span in receiver.spans if span.kind == "SERVER"} == named
        assert len(named) == 16


@pytest.mark.nightly
@pytest.mark.sampled(2)
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_without_a_collector_requests_are_answered_and_the_end_is_not_held_up(protocol):
    # The exporter would go on to try for an hour.
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "3600", **SOON}
    with Server(*OPTIONS, "--otlp-traces-endpoint", "http://127.0.0.1:1", **environment) as server:
        for _ in range(5):
            assert complete(server.url).status == 200
        assert server.stop() == 0
        assert "Traceback" not in server.log
        assert server.log.count("Traces: ") <= 4


@pytest.mark.nightly
def test_without_the_option_nothing_is_sent_whatever_the_environment_says():
    with http_receiver() as receiver:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_PYTHON_TRACER_PROVIDER": "sdk_tracer_provider",
            "OTEL_TRACES_EXPORTER": "otlp",
            "FASTAPI_OTEL_AUTO_CONFIGURE": "true",
            **SOON,
        }
        with Server(*OPTIONS, **environment) as server:
            answer = complete(server.url)
            assert (answer.status, server.stop()) == (200, 0)
        assert "traceresponse" not in answer.headers
        assert receiver.spans == []


def test_a_proxy_adds_its_spans_and_passes_the_trace_on():
    with grpc_receiver() as receiver:
        option = ("--otlp-traces-endpoint", receiver.endpoint)
        with Server(*OPTIONS, *option) as server, Proxy(server.url, options=option) as proxy:
            answer = complete(proxy.url, traceparent=PARENT, tracestate="vendor=1")
            lost = complete(proxy.url, {**BODY, "top_p": 3})
            alone = complete(proxy.url, traceparent=PARENT[:-1] + "0")
            assert (answer.status, lost.status, alone.status) == (200, 400, 200)
            assert (proxy.stop(), server.stop()) == (0, 0)
        trace_id = PARENT.split("-")[1]
        spans = {span.span_id: span for span in receiver.of(trace_id, 6)}
        assert len(spans) == 6  # none of the request whose client has said no
        (root,) = (span for span in spans.values() if span.parent_id == PARENT.split("-")[2])
        assert (root.name, root.kind, root.state) == ("POST /v1/completions", "SERVER", "vendor=1")
        assert root.resource["service.name"] == "quire-route"
        assert answer.headers["traceresponse"] == f"00-{trace_id}-{root.span_id}-01"
        (call,) = (span for span in spans.values() if span.parent_id == root.span_id)
        assert (call.name, call.kind, call.attributes["http.response.status_code"]) == ("POST", "CLIENT", 200)
        assert call.attributes["url.full"] == f"{server.url}/v1/completions"
        (served,) = (span for span in spans.values() if span.parent_id == call.span_id)
        assert (served.kind, served.resource["service.name"], served.state) == ("SERVER", "quire", "vendor=1")
        # The server's span may end after the proxy's: it ends when the last byte has been sent.
        assert root.start <= call.start <= served.start <= min(served.end, root.end)
        refused = receiver.of(lost.headers["traceresponse"].split("-")[1], 3)
        assert [span.attributes["error.type"] for span in refused] == ["400"] * 3
        assert [span.status for span in refused] == ["UNSET", "ERROR", "UNSET"]


@pytest.mark.nightly
def test_a_proxy_without_servers_says_so_in_its_span():
    with grpc_receiver() as receiver, Server(*OPTIONS) as server:
        option = ("--otlp-traces-endpoint", receiver.endpoint)
        with Proxy(server.url, options=option) as proxy:
            assert server.stop() == 0
            assert complete(proxy.url).status in (502, 503)
            assert proxy.stop() == 0
        (root,) = (span for span in receiver.spans if span.kind == "SERVER")
        assert root.status == "ERROR"
        assert root.attributes["error.type"] in ("no_healthy_backend", "backend_lost")
