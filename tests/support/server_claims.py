"""The checks of the reasons of vLLM's options that ask a server, by claim."""

from __future__ import annotations

import logging
import os
import socket
import threading

import psutil
import pytest

from quire.messages.sampling_params import SamplingParams
from support.claims import Checks, Parts
from support.waiting import LONGEST

CHECKS = Checks()
ASKED = {"max_tokens": 6, "ignore_eos": True}


class Lines(logging.Handler):
    """The messages of Quire's log while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"

    def __enter__(self) -> Lines:
        self._logger = logging.getLogger("quire")
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


@CHECKS.of("what is logged", "times of requests")
def _what_is_logged(parts: Parts) -> None:
    with Lines() as lines:
        answer = parts.server.complete("Once upon a time", **ASKED)
        refused = parts.server.post("/v1/completions", {"prompt": "a", "max_tokens": -1})
    assert refused.status == 400
    assert answer["choices"][0]["text"].strip() not in lines.text
    assert "Once upon" not in lines.text
    assert "Traceback" not in lines.text
    assert "first token" in lines.text, "the line of a request has its times"
    assert not answer.get("metrics")


@CHECKS.of("which metrics")
def _which_metrics(parts: Parts) -> None:
    parts.server.complete("a", **ASKED)
    text = parts.server.get("/metrics").body.decode()
    assert not [name for name in ("mfu", "cudagraph", "kv_block_lifetime", "kv_cache_residency") if name in text]
    assert 'quire:time_to_first_token_seconds_bucket{engine="0",le="0.001"' in text


@CHECKS.of("statistics of the server")
def _statistics(parts: Parts) -> None:
    with Lines() as lines:
        parts.llm.generate(["a"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert "tokens/s" not in lines.text


@CHECKS.of("endpoints", "replicas are fixed")
def _endpoints(parts: Parts) -> None:
    for path in ("/tokenizer_info", "/v1/chat/completions/render", "/cohere/v2/chat", "/scale_elastic_ep"):
        assert parts.server.post(path, {}).status == 404, path
    assert parts.server.post("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": ASKED}).status == 200


@CHECKS.of("tokens in, tokens out")
def _tokens(parts: Parts) -> None:
    asked = {"token_ids": [5, 6, 7], "sampling_params": ASKED}
    assert len(parts.server.post("/inference/v1/generate", asked).json["choices"][0]["token_ids"]) == 6
    parts.server.chat("Hello", max_tokens=2)


@CHECKS.of("HTTP only")
def _http_only(parts: Parts) -> None:
    with socket.create_connection(("127.0.0.1", parts.server.port), timeout=LONGEST) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert connection.recv(100).startswith((b"HTTP/1.1 ", b""))


@CHECKS.of("fingerprint")
def _fingerprint(parts: Parts) -> None:
    assert parts.server.complete("a", **ASKED)["system_fingerprint"] is None


@CHECKS.of("streams")
def _streams(parts: Parts) -> None:
    events = parts.server.complete("Once", **ASKED, stream=True, return_token_ids=True)
    counts = [len(choice["token_ids"]) for event in events for choice in event["choices"] if choice.get("token_ids")]
    assert sum(counts) == 6
    assert len(counts) > 1


@CHECKS.of("always enabled")
def _always_enabled(parts: Parts) -> None:
    answer = parts.server.post("/v1/completions", {"prompt": "a", **ASKED})
    assert "x-request-id" in answer.headers
    assert "cached_tokens" in answer.json["usage"]["prompt_tokens_details"]
    assert parts.server.get("/load").status == 200
    page = parts.server.get("/docs").body.decode()
    assert "https://" not in page.replace("https://github.com", "")


@CHECKS.of("two processes")
def _two_processes(parts: Parts) -> None:
    parts.server.complete("a", **ASKED)
    assert psutil.Process().children(recursive=True), "the engine core is another process"


@CHECKS.of("tokenizer")
def _tokenizer(parts: Parts) -> None:
    tokenizer, seen = parts.host.llm.frontend.tokenizer, []
    encode = tokenizer.encode

    def noting(*arguments, **options):
        seen.append((os.getpid(), threading.current_thread().name))
        return encode(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "encode", noting)
        parts.server.complete("Once upon a time " * 20, **ASKED)
    assert seen
    assert {pid for pid, _ in seen} == {os.getpid()}


@CHECKS.of("names of the model")
def _names(parts: Parts) -> None:
    assert [card["id"] for card in parts.server.get("/v1/models").json["data"]] == ["demo"]


@CHECKS.of("no watermarks")
def _no_watermarks(parts: Parts) -> None:
    refused = parts.server.post("/v1/completions", {"prompt": "a", "watermarking": True})
    assert (refused.status, refused.error["param"]) == (400, "watermarking")


@CHECKS.of("tools of clients")
def _tools_of_clients(parts: Parts) -> None:
    plain = parts.server.post("/v1/responses", {"input": "a", "max_output_tokens": 4}).json
    asked = {"input": "a", "max_output_tokens": 4, "tools": [{"type": "web_search"}]}
    answer = parts.server.post("/v1/responses", asked).json
    assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"], "the model knows nothing of the tool"
    assert {item["type"] for item in answer["output"]} <= {"message", "reasoning"}
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}
    asked = {"input": "a", "tools": [tool], "tool_choice": {"type": "function", "name": "look_up"}}
    [call] = parts.server.post("/v1/responses", asked).json["output"]
    assert (call["type"], call["name"]) == ("function_call", "look_up")
