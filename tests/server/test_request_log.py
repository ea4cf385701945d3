"""The log has one line about each request when it is over, with what an operator wants to know of it."""

from __future__ import annotations

import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import ConfigError, ServerConfig
from quire.messages.outputs import CompletionOutput, RequestOutput, RequestStateStats
from quire.server.request_log import MAX_PARAMETERS, RequestLog, Summary
from support.server import Answer, Host, Service, eventually

GREEDY = {"temperature": 0, "ignore_eos": True}
TIMES = r"first token after \d+\.\d{3} s, \d+\.\d ms per token"

pytestmark = pytest.mark.usefixtures("info_is_captured")


def line(caplog, answer: Answer) -> logging.LogRecord:
    """The only line about a request, when it is over."""
    request_id = answer.headers["x-request-id"]

    def found() -> list[logging.LogRecord]:
        return [r for r in caplog.records if request_id in r.getMessage()]

    eventually(found)
    (record,) = found()
    return record


def about(caplog, answer: Answer) -> str:
    """What the line says behind the request's id."""
    return line(caplog, answer).getMessage().partition(f"request {answer.headers['x-request-id']}: ")[2]


# ---- requests that run


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_leaves_its_tokens_and_times(host: Host, caplog, stream):
    service, prompt = host.serve(), f"There was an old house, and nobody knew that it was {stream} at all. It stood"
    for cached in (0, 16):
        body = {"prompt": prompt, "max_tokens": 5, "stream": stream, **GREEDY}
        answer = service.post("/v1/completions", body)
        record = line(caplog, answer)
        tokens = record.fields["prompt_tokens"]
        said = rf"{tokens} prompt tokens \({cached} cached\), 5 generated \(length\), {TIMES}"
        request_id = answer.headers["x-request-id"]
        head = rf"127\.0\.0\.1:\d+ POST /v1/completions 200 in \d+\.\d{{3}} s, request {request_id}: "
        assert re.fullmatch(head + said, record.getMessage())
        assert record.levelno == logging.INFO


def test_the_fields_of_a_line_are_there_for_programs(host: Host, caplog):
    answer = host.serve().post("/v1/completions", {"prompt": "Once", "max_tokens": 3, **GREEDY})
    fields = line(caplog, answer).fields
    usage = answer.json["usage"]
    assert fields["request_id"] == answer.headers["x-request-id"]
    assert (fields["response_id"], fields["model"]) == (answer.json["id"], "demo")
    assert (fields["method"], fields["path"], fields["status"]) == ("POST", "/v1/completions", 200)
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (usage["prompt_tokens"], 3)
    assert (fields["finish_reason"], fields["completions"], fields["cached_tokens"]) == ("length", 1, 0)
    assert 0 < fields["time_per_output_token_seconds"] < fields["time_to_first_token_seconds"] + fields["seconds"]
    assert fields["time_to_first_token_seconds"] < fields["seconds"]
    assert json.loads(json.dumps(fields)) == fields


def test_several_completions_are_one_line(host: Host, dictating: Host, caplog):
    body = {"prompt": ["Once", "Twice"], "n": 2, "max_tokens": 6, "temperature": 1, "ignore_eos": True}
    assert " 24 generated (length), " in about(caplog, host.serve().post("/v1/completions", body))
    tokenizer = dictating.llm.get_tokenizer()
    say = [*tokenizer.encode("Yes.", False), tokenizer.eos_token_id]
    body = {"prompt": ["Once", "Twice", "Thrice"], "max_tokens": 50, "temperature": 0, "vllm_xargs": {"say": say}}
    fields = line(caplog, dictating.serve().post("/v1/completions", body)).fields
    assert (fields["completions"], fields["finish_reason"]) == (3, "stop")


CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
    "response": ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
    "anthropic": ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 4}}),
    "ollama text": ("/api/generate", {"prompt": "Hello", "raw": True, "options": {"num_predict": 4}}),
    "tokens": ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CHATS)
def test_every_api_that_generates_leaves_such_a_line(host: Host, caplog, name, stream):
    path, body = CHATS[name]
    answer = host.serve(response_store="memory").post(path, {**body, "stream": stream, "ignore_eos": True})
    assert answer.status == 200
    assert re.search(r"\d+ prompt tokens \(\d+ cached\), [1-4] generated \((length|stop)\)", about(caplog, answer))


def test_another_model_than_the_first_is_named_and_an_id_that_clients_see(host: Host, caplog):
    service = host.serve(served_model_name=["small", "old-name"], response_store="memory")
    assert "model" not in about(caplog, service.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
    body = {"input": "Hello", "max_output_tokens": 1, "model": "old-name"}
    answer = service.post("/v1/responses", body)
    assert about(caplog, answer).startswith(f"{answer.json['id']}; model old-name; ")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_in_the_background_leaves_its_line_when_it_has_ended(host: Host, caplog, stream):
    service = host.serve(response_store="memory")
    body = {"input": "Hello", "max_output_tokens": 300, "background": True, "ignore_eos": True, "stream": stream}
    answer = service.post("/v1/responses", body)
    record = line(caplog, answer)
    assert "POST /v1/responses 200 in" in record.getMessage()
    assert record.fields["completion_tokens"] == 300
    assert record.fields["response_id"].startswith("resp_")


def test_requests_without_tokens_have_a_short_line(host: Host, caplog):
    service = host.serve()
    for answer in (service.get("/v1/models"), service.post("/tokenize", {"prompt": "a"})):
        message = line(caplog, answer).getMessage()
        assert message.endswith(f" s, request {answer.headers['x-request-id']}")


# ---- requests that end otherwise


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_told_of_with_the_tokens_so_far(host: Host, caplog, stream):
    service, request_id = host.serve(), f"leaver-{stream}"
    body = json.dumps({"prompt": "a", "max_tokens": 1900, "stream": stream, "ignore_eos": True}).encode()
    head = f"Host: x\r\nX-Request-Id: {request_id}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", service.port)) as raw:
        raw.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
        eventually(lambda: host.llm.client.stats.num_running == 1)
        if stream:
            raw.recv(10)
    record = line(caplog, Answer(0, {"x-request-id": request_id}, b""))
    assert record.levelno == logging.INFO
    said = r"the client closed the connection; \d+ prompt tokens \(\d+ cached\), \d+ generated \(abort\)"
    assert re.search(rf"request {request_id}: {said}", record.getMessage())
    assert record.fields["status"] == (200 if stream else 499)
    assert (record.fields["error_status"], record.fields["finish_reason"]) == (499, "abort")


def test_a_request_that_ends_with_an_error_has_its_tokens_too(host: Host, caplog):
    body = {"prompt": "a", "max_tokens": 2000, "n": 60, "temperature": 1, "ignore_eos": True}
    answer = host.post_until_time_is_up("/v1/completions", body)
    record = line(caplog, answer)
    assert record.levelno == logging.ERROR
    said = (
        r"the answer ended with error 504, the request was not finished .*; .* generated \(abort\), first token after"
    )
    assert re.search(said, record.getMessage())
    assert (record.fields["status"], record.fields["error_code"]) == (200, "timeout")
    eventually(lambda: host.is_idle)


def test_the_line_of_a_refused_request_says_why_and_in_which_field(host: Host, caplog):
    answer = host.serve().post("/v1/completions", {"prompt": "a", "temperature": -1})
    record = line(caplog, answer)
    assert record.fields["error"] == answer.error["message"]
    assert (record.fields["status"], record.fields["error_param"]) == (400, "temperature")
    assert "prompt_tokens" not in record.fields
    assert record.getMessage().endswith(answer.error["message"])


# ---- options


def received(caplog, answer: Answer) -> list[logging.LogRecord]:
    request_id = answer.headers["x-request-id"]
    return [r for r in caplog.records if r.getMessage().startswith(f"Request {request_id}")]


def test_a_request_is_logged_when_it_comes_with_the_parameters_that_are_no_defaults(host: Host, caplog):
    service = host.serve(enable_log_requests=True)
    body = {"prompt": "Tell me a secret", "temperature": 0.5, "stop": ["a\nb"], "max_tokens": 7}
    [record] = received(caplog, service.post("/v1/completions", body))
    message = record.getMessage()
    assert re.search(r" received: \d+ prompt tokens, temperature=0\.5, stop=\['a\\nb'\], max_tokens=7", message)
    assert "top_p" not in message
    assert "secret" not in message
    assert record.fields["prompt_tokens"] > 1


def test_prompts_are_logged_if_that_is_asked_for_and_cut(host: Host, caplog):
    service = host.serve(log_prompts=True, max_log_len=5)
    answer = service.post("/v1/completions", {"prompt": ["Te\nll me a secret", "x"], "max_tokens": 2})
    messages = [record.getMessage().partition(": ")[2] for record in received(caplog, answer)]
    assert messages[1].startswith(r"prompt 'Te\nll', token ids [")
    assert messages[2].startswith("prompt 'x', token ids [")
    answer = service.post("/v1/completions", {"prompt": [1, 2, 3, 4, 5, 6, 7], "max_tokens": 2})
    assert received(caplog, answer)[1].getMessage().endswith(": prompt None, token ids [1, 2, 3, 4, 5]")
    assert "secret" not in caplog.text


def test_debugging_alone_shows_no_prompts(host: Host, caplog):
    caplog.set_level("DEBUG", "quire")
    service = host.serve(enable_log_requests=True)
    service.post("/v1/completions", {"prompt": "a secret", "max_tokens": 2})
    assert "secret" not in caplog.text


def test_long_parameters_are_cut_and_cannot_forge_lines(host: Host, caplog):
    service = host.serve(enable_log_requests=True)
    body = {"prompt": "a", "stop": ["\n12:00:00 ERROR lost" * 500], "max_tokens": 1}
    [record] = received(caplog, service.post("/v1/completions", body))
    assert len(record.getMessage()) < MAX_PARAMETERS + 200
    assert record.getMessage().isprintable()


def test_refusals_show_what_they_quote_if_prompts_may_be_logged(host: Host, caplog):
    body = {"prompt": "a", "structured_outputs": {"regex": "secret("}}
    answer = host.serve().post("/v1/completions", body)
    said = "structured_outputs: the reason may quote the request, so only the answer has it; "
    assert about(caplog, answer).startswith(said)
    answer = host.serve(log_prompts=True).post("/v1/completions", body)
    request_id = answer.headers["x-request-id"]
    eventually(lambda: any(r.fields.get("error") for r in caplog.records if request_id in r.getMessage()))
    assert answer.error["message"].splitlines()[0] in caplog.text


def test_requests_of_the_page_leave_no_line_unless_they_fail(host: Host, caplog):
    service = host.serve()
    assert service.get("/ui/about").status == 200
    missing = service.get("/ui/no-such-file")
    assert "/ui/no-such-file 404" in line(caplog, missing).getMessage()
    assert not [r for r in caplog.records if "/ui/about" in r.getMessage()]


# ---- the access log

COMBINED = r'127\.0\.0\.1 - - \[\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}\] "(.*)" (\d{3}) (\d+|-) "(.*)" "(.*)"'


def access_lines(path: Path, count: int) -> list[tuple[str, ...]]:
    eventually(lambda: path.read_text().count("\n") == count)
    found = [re.fullmatch(COMBINED, text) for text in path.read_text().splitlines()]
    return [match.groups() for match in found]


def test_the_access_log_has_the_combined_format(host: Host, tmp_path: Path, caplog):
    path = tmp_path / "access.log"
    service = host.serve(access_log=str(path), disable_uvicorn_access_log=True)
    answer = service.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, User_Agent='me "1"', Referer="http://x/")
    service.get("/health")
    refused = service.get("/v2/none?a=b%20c")
    assert access_lines(path, 2) == [
        ("POST /v1/completions HTTP/1.1", "200", str(len(answer.body)), "http://x/", r"me \x221\x22"),
        ("GET /v2/none?a=b%20c HTTP/1.1", "404", str(len(refused.body)), "-", "-"),
    ]
    assert answer.headers["x-request-id"] not in caplog.text


def test_the_access_log_may_be_rotated(host: Host, tmp_path: Path):
    path = tmp_path / "access.log"
    service = host.serve(access_log=str(path))
    service.get("/v1/models")
    access_lines(path, 1)
    path.rename(tmp_path / "access.log.1")
    service.get("/v1/models")
    eventually(path.exists)
    access_lines(path, 1)


def test_an_access_log_that_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"access_log='.*/missing/a.log' cannot be written"):
        RequestLog(ServerConfig(access_log=str(tmp_path / "missing" / "a.log")))


def test_headers_cannot_forge_lines_of_the_access_log(host: Host, tmp_path: Path):
    path = tmp_path / "access.log"
    service: Service = host.serve(access_log=str(path))
    head = b'GET /v1/models?\x7f"x HTTP/1.1\r\nHost: x\r\nUser-Agent: a\x85"\xe2\x80\xa8\t\\n\r\n\r\n'
    with socket.create_connection(("127.0.0.1", service.port)) as raw:
        raw.sendall(head)
        raw.recv(1000)
    service.get("/v1/models")
    eventually(lambda: path.exists() and path.read_text().splitlines())
    assert all(re.fullmatch(COMBINED, text) for text in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("reasons", "said"), [(["stop"] * 3, "stop"), (["stop", "length", "stop"], "1 length, 2 stop")]
)
def test_a_line_counts_how_completions_ended(reasons: list[str], said: str):
    completions = [CompletionOutput(i, "", [1] * (i + 2), finish_reason=reason) for i, reason in enumerate(reasons)]
    times = RequestStateStats(first_token_ts=10.5, last_token_ts=11.1)
    summary = Summary("cmpl-1", "demo", is_other_model=False)
    summary.count([RequestOutput("1", None, [1] * 7, completions, num_cached_tokens=4, metrics=times)], 10.0)
    tokens = f"7 prompt tokens (4 cached), 9 generated ({said})"
    assert summary.text == f"{tokens}, first token after 0.500 s, 200.0 ms per token"
