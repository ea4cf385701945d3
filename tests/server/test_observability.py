"""Each HTTP request leaves a line in the log, if it was refused or if that is wanted, and is counted."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.server.observability import HttpMetrics
from quire.server.process_metrics import ProcessMetrics
from support.server import Answer, Host, Service, eventually

SHORT = {"prompt": "a", "max_tokens": 1}
JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer very-secret-key"}

pytestmark = pytest.mark.usefixtures("info_is_captured")


@pytest.fixture(scope="module")
def guarded(host: Host) -> Service:
    return host.serve(api_key=["very-secret-key"], max_body_bytes=5000, max_generated_tokens=10_000)


def lines(caplog, answer: Answer) -> list[logging.LogRecord]:
    """What the log says about a request, when it is over."""
    request_id = answer.headers["x-request-id"]

    def found() -> list[logging.LogRecord]:
        return [r for r in caplog.records if r.name == "quire" and f"request {request_id}" in r.getMessage()]

    eventually(found)
    return found()


def counted(service: Service, name: str, **labels: str) -> float:
    return service.app.state.http_metrics.registry.get_sample_value(name, labels) or 0.0


def post(body: Any, path: str = "/v1/completions", **headers: str) -> tuple[str, str, bytes, dict[str, str]]:
    return "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), {**JSON, **KEY, **headers}


REFUSED: dict[str, tuple[int, str, tuple[str, str, bytes | None, dict[str, str]], str]] = {
    # name: status, handler, request, part of the message
    "no key": (401, "/v1/models", ("GET", "/v1/models", None, {}), "a valid API key is needed"),
    "unknown path": (404, "none", ("GET", "/v2/nothing", None, KEY), "/v2/nothing"),
    "unknown model": (404, "/v1/completions", post({**SHORT, "model": "x"}), "the model 'x' does not exist"),
    "wrong method": (405, "/v1/completions", ("PUT", "/v1/completions", b"{}", KEY), "PUT"),
    "large body": (413, "/v1/completions", post({"prompt": "x" * 6000}), "5000 bytes"),
    "foreign page": (403, "/tokenize", post({}, "/tokenize", Origin="https://a.example"), "--allowed-origins"),
    "no JSON": (400, "/v1/completions", post(b"{"), "not JSON"),
    "validation": (400, "/v1/completions", post({**SHORT, "top_p": "a"}), "top_p"),
    "range": (400, "/v1/completions", post({**SHORT, "temperature": -1}), "temperature"),
    "token id": (400, "/v1/completions", post({**SHORT, "prompt": [10**6]}), "vocabulary"),
    "too many tokens": (400, "/v1/completions", post({**SHORT, "n": 20, "max_tokens": 1000}), "10000"),
    "chat": (400, "/v1/chat/completions", post({"messages": []}, "/v1/chat/completions"), "messages"),
    "request id": (400, "/v1/models", ("GET", "/v1/models", None, {**KEY, "X-Request-Id": "a b"}), "X-Request-Id"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_request_leaves_one_line_and_is_counted(guarded: Service, caplog, name):
    status, handler, (method, path, body, headers), message = REFUSED[name]
    labels = {"handler": handler, "method": method}
    before = counted(guarded, "http_requests_total", **labels, status="4xx")
    answer = guarded.request(method, path, body, **headers)
    assert answer.status == status
    (record,) = lines(caplog, answer)
    assert record.levelno == logging.WARNING
    said = re.fullmatch(r"127\.0\.0\.1:\d+ (\w+) (\S+) (\d+) in \d+\.\d{3} s, request (\S+): (.+)", record.getMessage())
    assert said, record.getMessage()
    assert said.groups()[:3] == (method, path, str(status))
    assert message in said[5]
    assert said[5] == answer.error["message"]
    assert counted(guarded, "http_requests_total", **labels, status="4xx") == before + 1
    assert counted(guarded, "http_request_duration_seconds_count", **labels) > 0
    assert "very-secret-key" not in caplog.text


def test_refusals_of_a_busy_and_of_an_ending_server_are_logged(host: Host, caplog):
    full = host.serve(max_waiting_requests=0)
    body = {"prompt": "a", "max_tokens": 1500, "n": 64, "temperature": 1, "ignore_eos": True, "stream": True}
    with full.connection("/v1/completions", body):
        eventually(lambda: host.llm.client.stats.num_running == 64)
        answer = full.post("/v1/completions", SHORT)
    assert answer.status == 429
    assert "requests are waiting" in lines(caplog, answer)[0].getMessage()
    full.app.state.draining = True
    answer = full.post("/v1/completions", SHORT)
    (record,) = lines(caplog, answer)
    assert (answer.status, record.levelno) == (503, logging.ERROR)
    assert "shutting down" in record.getMessage()
    assert counted(full, "http_requests_total", handler="/v1/completions", method="POST", status="5xx") == 1
    eventually(lambda: host.is_idle)


def test_an_exception_is_a_500_with_a_request_id_and_a_traceback_in_the_log(host: Host, caplog):
    service = host.serve()

    def fail() -> None:
        what = "bug"
        raise RuntimeError(f"a {what}")

    service.app.add_api_route("/fail", fail)
    answer = service.get("/fail", X_Request_Id="mine")
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    (record,) = lines(caplog, answer)
    assert record.levelno == logging.ERROR
    assert "/fail 500" in record.getMessage()
    assert "in fail" in caplog.text
    assert "RuntimeError" in caplog.text
    assert "a bug" not in caplog.text  # the text of an exception may quote a prompt
    caplog.set_level("DEBUG", "quire")
    service.get("/fail")
    assert "a bug" in caplog.text


def test_a_stream_that_ends_with_an_error_is_logged_although_its_status_was_200(host: Host, caplog):
    body = {"prompt": "a", "max_tokens": 2000, "n": 60, "temperature": 1, "ignore_eos": True}
    answer = host.post_until_time_is_up("/v1/completions", body, disable_uvicorn_access_log=True)
    assert answer.status == 200
    (record,) = lines(caplog, answer)
    assert record.levelno == logging.ERROR
    assert "200 in" in record.getMessage()
    assert "the answer ended with error 504, the request was not finished within" in record.getMessage()
    eventually(lambda: host.is_idle)


def test_a_client_that_leaves_is_no_refusal(host: Host, caplog):
    service = host.serve()
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "request_id": "leaves"}
    with service.connection("/v1/completions", body):
        eventually(lambda: host.llm.client.stats.num_running == 1)
    eventually(lambda: any("the client closed the connection" in r.getMessage() for r in caplog.records))
    assert [r.levelno for r in caplog.records if "the client closed" in r.getMessage()] == [logging.INFO]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    caplog.clear()
    with socket.create_connection(("127.0.0.1", service.port)) as raw:  # leaves within its body
        raw.sendall(head)
    eventually(lambda: any("the client closed the connection" in r.getMessage() for r in caplog.records))
    assert {r.levelno for r in caplog.records if r.name == "quire"} == {logging.INFO}


def test_what_clients_write_cannot_forge_lines_or_fill_the_log(guarded: Service, caplog):
    forged = "x\n12:00:00 ERROR \x1b[31m\u2028all is lost"
    answers = [
        guarded.post("/v1/completions", {**SHORT, "model": forged}, **KEY),
        guarded.get("/v2/%0a12:00:00%20ERROR%20lost%1b%5b31m" + "y" * 3000, **KEY),
        guarded.post("/v1/completions", {**SHORT, "top_p\n\r": 1, "response_format": "\n" * 2000}, **KEY),
    ]
    for answer in answers:
        assert answer.status in (400, 404)
        (record,) = lines(caplog, answer)
        assert record.getMessage().isprintable()
        assert len(record.getMessage()) < 1200


# ---- requests that succeed


def test_requests_that_succeed_are_logged_but_for_probes(host: Host, caplog):
    service = host.serve()
    answer = service.post("/v1/completions", SHORT)
    (record,) = lines(caplog, answer)
    assert record.levelno == logging.INFO
    for path in ("/health", "/ping", "/version", "/metrics", "/load"):
        service.get(path)
    lines(caplog, service.get("/v1/models"))
    assert not [r for r in caplog.records if "/health" in r.getMessage() or "/metrics" in r.getMessage()]


def test_the_access_log_can_be_switched_off_for_paths_and_altogether(host: Host, caplog):
    chosen = host.serve(disable_access_log_for_endpoints="/v1/models,/v1/completions")
    silent = host.serve(disable_uvicorn_access_log=True)
    quiet = [chosen.get("/v1/models"), chosen.post("/v1/completions", SHORT), silent.get("/v1/models")]
    lines(caplog, chosen.get("/health"))
    lines(caplog, chosen.post("/v1/completions", {**SHORT, "n": 0}))  # refused: logged in any case
    lines(caplog, silent.get("/nothing"))
    logged = " ".join(r.getMessage() for r in caplog.records)
    assert not any(answer.headers["x-request-id"] in logged for answer in quiet)


def test_paths_are_those_behind_the_root_path(host: Host, caplog):
    service = host.serve(root_path="/llm")
    for path in ("/llm/health", "/health", "/llm/v1/models", "/v1/models"):
        answer = service.get(path)
        assert answer.status == 200
    lines(caplog, answer)
    said = [r.getMessage().split()[1:4] for r in caplog.records if "GET" in r.getMessage()]
    assert said == [["GET", "/v1/models", "200"]] * 2
    assert counted(service, "http_requests_total", handler="/v1/models", method="GET", status="2xx") == 2


# ---- metrics


def test_labels_are_not_made_of_what_clients_write(host: Host):
    service = host.serve()
    for index in range(20):
        service.get(f"/random/{index}")
        service.get(f"/v1/models/random-{index}")
    service.request("PROPFIND", "/v1/models")
    samples = [s for m in service.app.state.http_metrics.registry.collect() for s in m.samples]
    labels = {tuple(s.labels.values()) for s in samples if s.name == "http_requests_total"}
    expected = {("none", "GET", "4xx"), ("/v1/models/{model:path}", "GET", "4xx"), ("/v1/models", "other", "4xx")}
    eventually(lambda: counted(service, "http_requests_total", handler="/v1/models", method="other", status="4xx") == 1)
    assert labels <= expected


def test_sizes_and_times_of_streams_are_counted_whole(host: Host):
    service = host.serve()
    body = {**SHORT, "max_tokens": 50, "stream": True, "ignore_eos": True}
    answer = service.post("/v1/completions", body)
    name, labels = "http_response_size_bytes", {"handler": "/v1/completions"}
    eventually(lambda: counted(service, f"{name}_count", **labels) == 1)
    assert counted(service, f"{name}_sum", **labels) == len(answer.body)
    assert counted(service, "http_request_size_bytes_sum", **labels) == len(json.dumps(body))
    assert counted(service, "http_request_duration_highr_seconds_count") == 1
    assert counted(service, "http_requests_total", **labels, method="POST", status="2xx") == 1


def test_metrics_show_the_engine_http_and_the_process_and_probes_are_not_counted(server: Service):
    text = server.get("/metrics").body.decode()
    names = """quire:num_requests_running quire:cache_config_info http_request_duration_highr_seconds_count
        process_start_time_seconds process_open_fds python_gc_collections_total python_info"""
    for name in names.split():
        assert re.search(rf"^{name}[{{ ]", text, re.MULTILINE), name
    for process in ("api 0", "core 0"):
        found = re.search(rf'^process_resident_memory_bytes{{process="{process}"}} (\S+)$', text, re.MULTILINE)
        assert float(found[1]) > 10e6
        assert re.search(rf'^process_cpu_seconds_total{{process="{process}"}} ', text, re.MULTILINE)
    assert 'handler="/metrics"' not in text
    assert 'handler="/health"' not in text


def test_the_processes_of_a_cores_ranks_are_added_up():
    code = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) for _ in range(2)]
for rank in ranks:
    rank.stdout.readline()
print(1, flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as core:
        core.stdout.readline()
        found = {"core 0": core.pid, "core 1": 2**22 + 1}  # the second one has ended
        families = {family.name: family for family in ProcessMetrics(lambda: found, has_ranks=True).collect()}
        ranks = [child.memory_info().rss for child in psutil.Process(core.pid).children()]
        values = {
            sample.labels["process"]: sample.value for sample in families["process_resident_memory_bytes"].samples
        }
        assert values["ranks of core 0"] == pytest.approx(sum(ranks), rel=0.05)
        assert set(values) == {"core 0", "ranks of core 0"}
        assert [s.name for s in families["process_cpu_seconds"].samples] == ["process_cpu_seconds_total"] * 2
        assert len(families["process_max_fds"].samples) == 1


def test_the_documented_http_metrics_are_those_that_there_are():
    document = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(http_\w+)` \| (\w+) \| (.+?) \|", document, re.MULTILINE)
    metrics = HttpMetrics(ProcessMetrics(dict, has_ranks=False))
    metrics.count("/v1/models", "GET", 200, 0.1, 0, 10)
    shown = set()
    for family in metrics.registry.collect():
        for sample in family.samples[:1]:
            names = ", ".join(f"`{name}`" for name in sample.labels if name != "le") or "none"
            if family.name.startswith("http_"):
                shown.add((family.name + ("_total" if family.type == "counter" else ""), family.type, names))
    assert set(rows) == shown
