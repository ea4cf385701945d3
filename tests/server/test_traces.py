"""Spans by OpenTelemetry: a receiver of the official protobufs gets one for each request, with its parts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.config.engine import ConfigError
from quire.platform.extras import install_command
from support.chats import WEATHER
from support.dictation import CALLS
from support.otlp import SOON, Receiver, Span, grpc_receiver, http_receiver
from support.server import Answer, Host, Service, eventually

PARENT, STATE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0{}", "vendor=1,other=2"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with grpc_receiver() as receiver, pytest.MonkeyPatch.context() as patch:
        for name, value in SOON.items():
            patch.setenv(name, value)
        yield receiver


@pytest.fixture(scope="module")
def service(host: Host, receiver: Receiver) -> Service:
    return host.serve(otlp_traces_endpoint=receiver.endpoint, max_generated_tokens=2000, response_store="memory")


def names(answer: Answer) -> tuple[str, str]:
    """The trace and the span that an answer names."""
    _, trace_id, span_id, _ = answer.headers["traceresponse"].split("-")
    return trace_id, span_id


def spans_of(receiver: Receiver, answer: Answer, count: int) -> tuple[Span, list[Span]]:
    """The span of a request, and its children."""
    trace_id, span_id = names(answer)
    found = receiver.of(trace_id, count)
    (server,) = (span for span in found if span.span_id == span_id)
    children = [span for span in found if span.parent_id == span_id]
    assert len(found) == len(children) + 1 == count
    return server, children


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_with_its_tokens_and_times(service, receiver, stream):
    body = {
        "prompt": "Once upon a time there was a fox",
        "max_tokens": 9,
        "stream": stream,
        "seed": 7,
        "ignore_eos": True,
    }
    began = time.monotonic()
    answer = service.post("/v1/completions", {**body, "temperature": 0.5, "top_p": 0.75}, User_Agent="test/1")
    server, children = spans_of(receiver, answer, 4)
    most = time.monotonic() - began
    assert (server.name, server.kind, server.status) == ("POST /v1/completions", "SERVER", "UNSET")
    assert server.parent_id == ""
    said = server.attributes
    tokens = len(service.app.state.server.llm.get_tokenizer().encode(body["prompt"], True))
    response_id = answer.events[0]["id"] if stream else answer.json["id"]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.seed": 7,
        "gen_ai.request.n": 1,
        "gen_ai.usage.input_tokens": tokens,
        "gen_ai.usage.prompt_tokens": tokens,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.completion_tokens": 9,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.response.id": response_id,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.id": answer.headers["x-request-id"],
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "user_agent.original": "test/1",
        "client.address": "127.0.0.1",
        "server.address": "127.0.0.1",
        "server.port": service.port,
        "network.protocol.version": "1.1",
    }
    assert {name: said.get(name) for name in expected} == expected
    assert server.resource["service.name"] == "quire"
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    queue, prefill, decode = children
    assert server.start <= queue.start <= queue.end == prefill.start <= prefill.end == decode.start
    assert decode.start < decode.end <= server.end
    assert (prefill.attributes["gen_ai.usage.input_tokens"], decode.attributes["gen_ai.usage.output_tokens"]) == (
        tokens,
        9,
    )
    for name, seconds in {
        "time_in_queue": queue.seconds,
        "time_in_model_prefill": prefill.seconds,
        "time_in_model_decode": decode.seconds,
        "time_in_model_inference": prefill.seconds + decode.seconds,
    }.items():
        assert said[f"gen_ai.latency.{name}"] == pytest.approx(seconds, abs=1e-5), name
    first, whole = said["gen_ai.latency.time_to_first_token"], said["gen_ai.latency.e2e"]
    assert (prefill.end - server.start) / 1e9 - 1e-5 <= first < whole < most  # the request comes before its span begins


def test_no_text_of_a_request_is_in_its_span(service, receiver):
    answer = service.chat("The secret is xyzzy", max_tokens=4, stop=["plugh"])
    assert answer["choices"]
    answer = service.post(
        "/v1/completions", {"prompt": "The secret is xyzzy", "structured_outputs": {"regex": "xyzzy("}}
    )
    assert answer.status == 400
    server, _ = spans_of(receiver, answer, 1)
    assert all(word not in str(receiver.spans) for word in ("xyzzy", "plugh"))
    assert server.attributes["error.type"] == "400"


def test_a_trace_of_the_client_goes_on(service, receiver):
    answer = service.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
        traceparent=PARENT.format(1),
        tracestate=STATE,
    )
    trace_id, span_id = names(answer)
    assert trace_id == PARENT.split("-")[1]
    server = next(span for span in receiver.of(trace_id, 4) if span.span_id == span_id)
    assert (server.parent_id, server.state) == (PARENT.split("-")[2], STATE)
    assert server.attributes["gen_ai.operation.name"] == "chat"


@pytest.mark.parametrize("parent", ["00-0-0-01", "nonsense", "ff-" + PARENT.format(1)[3:]])
def test_a_context_that_is_wrong_is_ignored(service, receiver, parent):
    answer = service.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, traceparent=parent)
    server, _ = spans_of(receiver, answer, 4)
    assert server.parent_id == ""


def test_the_client_decides_whether_a_request_is_recorded(service, receiver):
    number = len(receiver.spans)
    parent = "00-" + "5" * 32 + "-00f067aa0ba902b7-00"
    answer = service.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, traceparent=parent)
    assert answer.status == 200
    assert names(answer)[0] == "5" * 32
    assert int(answer.headers["traceresponse"][-2:], 16) & 1 == 0
    spans_of(receiver, service.post("/v1/completions", {"prompt": "b", "max_tokens": 1}), 4)
    assert len(receiver.spans) == number + 4


@pytest.mark.parametrize("variable", ["always_off", "parentbased_traceidratio"])
def test_the_sampler_of_the_environment_is_used(host, receiver, monkeypatch, variable):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", variable)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    service = host.serve(otlp_traces_endpoint=receiver.endpoint)
    answer = service.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert int(answer.headers["traceresponse"][-2:], 16) & 1 == 0


REFUSED: dict[str, tuple[str, Any, str, int]] = {
    "value": ("/v1/completions", {"prompt": "a", "top_p": 2}, "400", 400),
    "model": ("/v1/completions", {"prompt": "a", "model": "b"}, "model_not_found", 404),
    "length": ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, "400", 400),
    "path": ("/v2/nothing/42", {}, "not_found", 404),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_request_has_a_span(service, receiver, case):
    path, body, error, status = REFUSED[case]
    answer = service.post(path, body)
    assert answer.status == status
    server, _ = spans_of(receiver, answer, 1)
    assert server.name == ("POST" if case == "path" else f"POST {path}")
    assert server.attributes["http.response.status_code"] == status
    assert server.attributes["error.type"] == error
    assert server.status == "UNSET"  # it is the client's error


def test_an_error_of_the_server_is_an_error_of_the_span(service, receiver):
    service.app.state.draining = True
    try:
        answer = service.post("/v1/completions", {"prompt": "a"})
    finally:
        service.app.state.draining = False
    server, _ = spans_of(receiver, answer, 1)
    assert (server.status, server.message) == ("ERROR", "the server is shutting down")
    assert server.attributes["error.type"] == "shutting_down"


def test_a_client_that_leaves_is_seen(service, receiver):
    body = {"prompt": "Once", "max_tokens": 1500, "stream": True, **GREEDY}
    number = len(receiver.spans)
    with service.connection("/v1/completions", body) as connection:
        assert b"200" in connection.recv(64)
        connection.recv(4096)
    eventually(lambda: len(receiver.spans) >= number + 4)
    (server,) = (span for span in receiver.spans[number:] if span.kind == "SERVER")
    assert server.attributes["error.type"] == "499"
    assert server.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < server.attributes["gen_ai.usage.output_tokens"] < 1500
    assert server.status == "UNSET"


def test_several_prompts_and_completions(service, receiver):
    body = {"prompt": ["Once", "Twice"], "n": 3, "max_tokens": 4, "temperature": 1, "ignore_eos": True}
    server, children = spans_of(receiver, service.post("/v1/completions", body), 7)
    assert server.attributes["gen_ai.response.finish_reasons"] == ["length"] * 6
    assert server.attributes["gen_ai.usage.output_tokens"] == 24
    assert server.attributes["gen_ai.request.choice.count"] == 3
    decodes = [child for child in children if child.name == "decode"]
    assert [decode.attributes["gen_ai.usage.output_tokens"] for decode in decodes] == [12, 12]
    assert {decode.attributes["gen_ai.prompt.index"] for decode in decodes} == {0, 1}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_events(dictating, receiver, stream):
    service = dictating.serve(otlp_traces_endpoint=receiver.endpoint)
    body = {"messages": [{"role": "user", "content": CALLS.strip()}], "tools": [WEATHER], "max_tokens": 500}
    answer = service.post("/v1/chat/completions", {**body, "temperature": 0, "stream": stream})
    assert answer.status == 200, answer.body
    server, _ = spans_of(receiver, answer, 4)
    assert {name for name, _ in server.events} == {"gen_ai.tool.call"}
    told = [(about["gen_ai.tool.name"], about["gen_ai.tool.call.id"]) for _, about in server.events]
    if not stream:
        calls = answer.json["choices"][0]["message"]["tool_calls"]
        assert told == [(call["function"]["name"], call["id"]) for call in calls]
    assert len(told) == 2


def test_a_response_in_the_background_has_one_span_until_it_has_been_generated(service, receiver):
    answer = service.post("/v1/responses", {"input": "Hi", "max_output_tokens": 40, "background": True, "store": True})
    assert answer.status == 200
    server, children = spans_of(receiver, answer, 4)
    assert server.attributes["gen_ai.usage.output_tokens"] >= 1
    assert server.attributes["gen_ai.response.id"] == answer.json["id"]
    assert children[-1].end <= server.end


def test_probes_and_pages_have_no_spans(service, receiver):
    for path in ("/health", "/metrics", "/", "/ui/about"):
        answer = service.get(path)
        assert answer.status == 200
        assert "traceresponse" not in answer.headers
    answer = service.get("/v1/models")
    server, _ = spans_of(receiver, answer, 1)
    assert server.name == "GET /v1/models"


def test_spans_are_sent_by_http(host, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with http_receiver() as receiver:
        service = host.serve(otlp_traces_endpoint=receiver.endpoint)
        server, _ = spans_of(receiver, service.post("/v1/completions", {"prompt": "a", "max_tokens": 2}), 4)
        assert server.resource["service.name"] == "mine"


@pytest.mark.parametrize(
    ("endpoint", "protocol", "message"),
    [
        ("127.0.0.1:4317", "grpc", "must be a URL such as"),
        ("http://127.0.0.1:4318", "http/json", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be grpc or http/protobuf"),
    ],
)
def test_a_wrong_address_is_refused(host, monkeypatch, endpoint, protocol, message):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with pytest.raises(ConfigError, match=message):
        host.serve(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize("is_traced", [False, True])
def test_fastapi_makes_no_spans_of_its_own(host, receiver, monkeypatch, is_traced):
    """Some versions of it do for the process's own provider, and describe errors, whose texts may quote prompts."""
    provider, memory = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    service = host.serve(otlp_traces_endpoint=receiver.endpoint if is_traced else None)
    answer = service.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    assert answer.status == 200
    assert memory.get_finished_spans() == ()
    if is_traced:
        spans_of(receiver, answer, 4)


@pytest.mark.slow
def test_the_libraries_are_imported_only_when_they_are_needed():
    code = """
import sys
import quire.cli.main, quire.server.app, quire.server.http_server, quire.router.serve
needed = "opentelemetry.sdk", "opentelemetry.exporter", "grpc"
assert not any(name.startswith(needed) for name in sys.modules)  # FastAPI imports the interface, where it is installed
sys.modules["opentelemetry.sdk"] = None
from quire.server.tracing import begin_tracing
from quire.platform.extras import install_command
try:
    begin_tracing("http://127.0.0.1:1", "x")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert "otlp_traces_endpoint needs OpenTelemetry (opentelemetry.sdk" in done.stdout
    assert install_command("otel") in done.stdout


def test_a_collector_that_is_down_disturbs_nothing(host, caplog, info_is_captured, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    service = host.serve(otlp_traces_endpoint="http://127.0.0.1:1")
    for number in range(30):
        answer = service.post("/v1/completions", {"prompt": f"Story {number}", "max_tokens": 2})
        assert answer.status == 200
    eventually(lambda: any(record.getMessage().startswith("Traces: ") for record in caplog.records))
    problems = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Traces: ")]
    assert len(problems) == len(set(problems)) <= 3
    assert "127.0.0.1:1" in problems[0]
    assert json.dumps(problems)
