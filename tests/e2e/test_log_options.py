"""The options of the log, on the command line of a real server."""

from __future__ import annotations

import json

import pytest

from support.server import eventually, request
from support.server_process import Server


@pytest.mark.slow
def test_requests_are_logged_and_statistics_left_out_as_the_options_say() -> None:
    flags = ["--log-prompts", "--max-log-len", "4", "--disable-log-stats", "--disable-uvicorn-access-log"]
    with Server(*flags) as server:
        for max_tokens in (3, -1):
            body = json.dumps({"prompt": "Once upon a time", "max_tokens": max_tokens}).encode()
            headers = {"Content-Type": "application/json", "X-Request-Id": f"of-{max_tokens}"}
            request(server.url, "POST", "/v1/completions", body, **headers)
        eventually(lambda: "of--1:" in server.log)
        _, metrics = server.get("/metrics")
    lines = server.log.splitlines()
    (received,) = [line for line in lines if "of-3" in line and " received: " in line]
    assert "max_tokens=3" in received
    (prompt,) = [line for line in lines if "of-3" in line and "prompt 'Once', token ids [" in line]
    assert "upon" not in prompt
    (refused,) = [line for line in lines if "of--1" in line]
    assert "WARNING" in refused
    assert "POST /v1/completions 400" in refused
    assert "http_requests_total" in metrics
    assert "quire:" not in metrics
