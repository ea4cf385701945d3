"""Who may ask, how much, and for how long; ids, draining, and what the server says of itself."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire._version import __version__
from support.server import Host, Service, eventually

LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 1}
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/abort_requests",
    "/reset_prefix_cache",
]


@pytest.fixture(scope="module")
def guarded(host: Host) -> Service:
    return host.serve(api_key=["secret", "другой"], max_body_bytes=2000, max_generated_tokens=100)


# ---- API keys


@pytest.mark.parametrize("path", [*PATHS, "/nowhere"])
def test_without_a_right_key_nothing_is_served(guarded, path):
    for given in (None, "Bearer", "Bearer wrong", "Bearer secre", "Bearer secrets", "Basic secret", ""):
        headers = {} if given is None else {"Authorization": given}
        answer = guarded.post(path, {}, **headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), given
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/v1/models", "/load", "/docs", "/openapi.json"])
def test_what_is_read_needs_a_key_too(guarded, path):
    assert guarded.get(path).status == 401
    assert guarded.get(path, Authorization="Bearer secret").status == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics"])
def test_probes_need_no_key(guarded, path):
    assert guarded.get(path).status == 200


def test_each_of_the_keys_opens(guarded):
    for key in ("secret", "другой"):
        header = f"bearer {key}".encode().decode("latin-1")
        assert guarded.post("/v1/completions", SHORT, Authorization=header).status == 200


def test_a_key_may_be_in_the_header_of_anthropics_clients(guarded):
    assert guarded.post("/v1/completions", SHORT, x_api_key="secret").status == 200
    assert guarded.post("/v1/completions", SHORT, x_api_key="secret", Authorization="Basic x").status == 200
    for given in ("wrong", ""):
        assert guarded.post("/v1/completions", SHORT, x_api_key=given).status == 401
    assert guarded.post("/v1/completions", SHORT, x_api_key="secret", Authorization="Bearer wrong").status == 401


# ---- sizes


def test_a_body_that_is_too_large_is_refused_with_or_without_its_length(guarded):
    key = "Authorization: Bearer secret\r\n"
    body = json.dumps({"prompt": "x" * 2000}).encode()
    answer = guarded.request(
        "POST", "/v1/completions", body, Authorization="Bearer secret", Content_Type="application/json"
    )
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    import socket

    with socket.create_connection(("127.0.0.1", guarded.port)) as raw:
        raw.sendall(f"POST /tokenize HTTP/1.1\r\nHost: x\r\n{key}Content-Type: application/json\r\n".encode())
        raw.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        raw.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert raw.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_more_tokens_than_a_request_may_ask_for_are_refused(guarded):
    def ask(path="/v1/completions", **fields):
        return guarded.post(path, {**SHORT, **fields}, Authorization="Bearer secret")

    assert ask(max_tokens=100).status == 200
    assert ask(max_tokens=101).error["param"] == "max_tokens"
    assert ask(max_tokens=50, prompt=["a", "b", "c"]).error["param"] == "max_tokens"
    assert ask(max_tokens=26, n=4, temperature=1).error["param"] == "max_tokens"
    assert ask(max_tokens=1, n=101, temperature=1).error["param"] == "n"
    assert ask(prompt=["a"] * 50, max_tokens=None, ignore_eos=True).json["usage"]["completion_tokens"] == 100
    chat = ask("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=None, ignore_eos=True)
    assert chat.json["usage"]["completion_tokens"] == 100


# ---- load


@pytest.mark.slow
def test_a_full_queue_answers_429(host: Host, server: Service):
    limited = host.serve(max_waiting_requests=3)
    with ThreadPoolExecutor(2) as pool:
        rows = pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 600, "n": 64, "temperature": 1})
        eventually(lambda: host.llm.client.stats.num_running == 64)
        waiting = pool.submit(limited.post, "/v1/completions", {**SHORT, "n": 3, "temperature": 1})
        eventually(lambda: host.llm.client.stats.num_waiting == 3)
        for fields in (SHORT, {**SHORT, "stream": True}):
            answer = limited.post("/v1/completions", fields)
            assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
            assert answer.headers["retry-after"].isdigit()
        assert server.get("/load").json == {"server_load": 1}
        assert rows.result().status == waiting.result().status == 200
    assert limited.post("/v1/completions", SHORT).status == 200
    assert host.is_idle


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_that_takes_too_long_is_ended(host: Host, path):
    hasty = host.serve(request_timeout=0.3)
    body = {**LONG, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1500, "n": 60, "temperature": 1}
    answer = hasty.post(path, body)
    assert (answer.status, answer.error["code"]) == (504, "timeout")
    *events, last = host.post_until_time_is_up(path, body).events
    assert events
    assert last["error"]["code"] == "timeout"
    eventually(lambda: host.is_idle)


@pytest.mark.slow
def test_while_draining_new_requests_are_refused_and_running_ones_go_on(host: Host):
    ending = host.serve()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ending.post, "/v1/completions", {**LONG, "max_tokens": 700})
        eventually(lambda: ending.get("/load").json["server_load"] == 1)
        ending.app.state.draining = True
        answer = ending.post("/v1/completions", SHORT)
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
        assert answer.headers["retry-after"].isdigit()
        assert running.result().json["usage"]["completion_tokens"] == 700


# ---- ids


def test_a_request_keeps_its_id(server):
    answer = server.post("/v1/completions", SHORT, X_Request_Id="trace-1")
    assert answer.headers["x-request-id"] == "trace-1"
    assert answer.json["id"] == "cmpl-trace-1"
    events = server.post("/v1/completions", {**SHORT, "stream": True}, X_Request_Id="trace-1").events
    assert {event["id"] for event in events} == {"cmpl-trace-1"}
    assert server.post("/v1/completions", {**SHORT, "request_id": "mine"}).json["id"] == "cmpl-mine"


def test_a_request_without_an_id_gets_one_whatever_becomes_of_it(server):
    answers = [server.post("/v1/completions", SHORT), server.post("/v1/completions", {}), server.get("/nowhere")]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 3
    assert answers[0].json["id"] == f"cmpl-{ids[0]}"


def test_two_requests_may_have_the_same_id_at_once(server):
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(
                server.post, "/v1/completions", {**SHORT, "max_tokens": 30, "temperature": 0}, X_Request_Id="same"
            )
            for _ in range(8)
        ]
    assert {json.dumps(answer.result().json["choices"]) for answer in asked} == {
        json.dumps(asked[0].result().json["choices"])
    }


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é"])
def test_an_id_that_cannot_be_one_is_refused(server, given):
    answer = server.post("/v1/completions", SHORT, X_Request_Id=given)
    assert answer.status == 400
    assert answer.error["param"] == "X-Request-Id"


def test_a_request_can_be_aborted_by_the_id_of_its_answer_or_its_own(server, host: Host):
    for name in ("cmpl-long", "long"):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, "/v1/completions", LONG, X_Request_Id="long")
            eventually(lambda: host.llm.client.stats.num_running == 1)
            assert server.post("/abort_requests", {"request_ids": [name, "other"]}).json == {"aborted": 1}
            [choice] = running.result().json["choices"]
        assert choice["finish_reason"] == "abort"
        eventually(lambda: host.is_idle)


# ---- what it says of itself


def test_the_models_are_listed_and_any_of_their_names_can_be_asked(host: Host):
    named = host.serve(served_model_name=["one", "org/two"])
    listed = named.get("/v1/models").json
    assert [card["id"] for card in listed["data"]] == ["one", "org/two"]
    assert all(card["max_model_len"] == 2048 and card["owned_by"] == "quire" for card in listed["data"])
    assert named.get("/v1/models/org/two").json == listed["data"][1]
    assert named.get("/v1/models/three").error["code"] == "model_not_found"
    assert named.complete("a", model="org/two", max_tokens=1)["model"] == "org/two"
    assert named.complete("a", max_tokens=1)["model"] == named.complete("a", model="", max_tokens=1)["model"] == "one"


def test_health_version_load_and_metrics(server):
    assert server.get("/health").status == server.get("/ping").status == server.request("POST", "/ping").status == 200
    assert server.get("/version").json == {"version": __version__}
    assert server.get("/load").json == {"server_load": 0}
    before = server.metric("generation_tokens_total")
    server.complete("Once", max_tokens=7, ignore_eos=True)
    assert server.metric("generation_tokens_total") == before + 7
    assert server.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    page = server.get("/docs").body.decode()
    assert "<html" in page.lower()
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(files) >= 3
    for file in files:  # all of them its own: the page works without the internet
        assert file.startswith(server.url)
        assert server.get(file.removeprefix(server.url)).status == 200


def test_pages_of_allowed_origins_may_call(host: Host, server: Service):
    open_to = host.serve(allowed_origins=["https://chat.example"], api_key=["secret"])
    asked = {"Origin": "https://chat.example", "Access_Control_Request_Method": "POST"}
    preflight = open_to.request("OPTIONS", "/v1/completions", **asked)
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert (
        open_to.get("/health", Origin="https://chat.example").headers["access-control-expose-headers"]
        == "X-Request-Id, traceresponse"
    )
    assert "access-control-allow-origin" not in open_to.get("/health", Origin="https://evil.example").headers
    assert "access-control-allow-origin" not in server.get("/health", Origin="https://chat.example").headers


def test_unknown_fields_are_ignored_and_logged_once(server, caplog):
    for _ in range(3):
        server.complete("a", max_tokens=1, fancy_new_field={"x": 1})
    assert [record.getMessage() for record in caplog.records].count(
        "Ignored a field that is not known: 'fancy_new_field'"
    ) == 1


# ---- faults


def test_a_fault_of_the_server_is_answered_in_the_same_shape_and_can_be_traced(host: Host):
    broken = host.serve()
    broken.app.state.server.model_names.clear()
    answer = broken.post("/v1/completions", SHORT, X_Request_Id="trace-2")
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"] == "trace-2"
    assert broken.get("/health").status == 200


@pytest.mark.nightly
def test_a_failed_engine_is_told_from_a_failed_request():
    host = Host(dtype="float32", kv_cache_memory_bytes=64 << 20)
    try:
        server, client = host.serve(), host.llm.client
        import os
        import signal

        def kill_core_when_it_runs() -> None:
            for cores in (1, 2):
                eventually(lambda: server.get("/health").status == 200 and client.stats.num_running == 1)
                os.kill(client.process_ids[0], signal.SIGKILL)
                eventually(lambda cores=cores: client.restarts == cores)

        for stream in (True, False):
            killer = threading.Thread(target=kill_core_when_it_runs)
            client.restarts = 0
            killer.start()
            answer = server.post("/v1/completions", {**LONG, "stream": stream})
            killer.join()
            if stream:
                assert answer.events[-1]["error"]["code"] == "request_failed"
            else:
                assert (answer.status, answer.error["code"]) == (500, "request_failed")
        assert server.get("/health").status == 503
        assert server.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1
        host.run(host.llm.shutdown())
        assert server.get("/health").status == 503
        for fields in (SHORT, {**SHORT, "stream": True}):
            answer = server.post("/v1/completions", fields)
            assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    finally:
        host.close()
