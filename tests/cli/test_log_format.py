"""`--log-format json`: each line of each process of a server is a JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from support.route import Proxy
from support.server import eventually, request
from support.server_process import Server

JSON = ("--log-format", "json")


def entries(log: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log.splitlines()]
    for entry in found:
        assert datetime.fromisoformat(entry["time"]).tzinfo is not None
        assert entry["level"] in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
        assert {"logger", "process", "pid", "message"} <= entry.keys()
    return found


def run(script: str) -> list[dict[str, Any]]:
    """The log of a program that begins to log as JSON."""
    head = "import logging, threading, warnings\nfrom quire.observability.logging import *\n"
    head += "configure_logging('INFO', 'json')\n"
    done = subprocess.run([sys.executable, "-c", head + script], capture_output=True, text=True)
    assert not done.stdout
    return entries(done.stderr)


SMALL = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M")


@pytest.mark.nightly
@pytest.mark.slow
def test_all_processes_of_a_server_write_objects() -> None:
    with Server(*JSON, "--api-server-count", "2", "--tensor-parallel-size", "2", *SMALL) as server:
        server.stop()
    found = entries(server.log)
    assert {entry["process"] for entry in found} >= {"MainProcess", "api 0", "api 1", "core 0", "rank 0"}
    assert len({entry["pid"] for entry in found}) >= 5


@pytest.mark.slow
def test_a_server_writes_objects_and_requests_have_fields(tmp_path: Path) -> None:
    config = tmp_path / "quire.yaml"
    config.write_text("log-format: json\n")
    with Server("--config", str(config), *SMALL) as server:
        for tokens in (3, -1):
            body = json.dumps({"prompt": "Once", "max_tokens": tokens, "ignore_eos": True}).encode()
            headers = {"Content-Type": "application/json", "X-Request-Id": f"with{tokens}"}
            request(server.url, "POST", "/v1/completions", body, **headers)
        eventually(lambda: "with-1" in server.log)
        server.stop()
    found = entries(server.log)
    assert {entry["process"] for entry in found} == {"MainProcess", "core 0"}
    by_id = {entry["request_id"]: entry for entry in found if "request_id" in entry}
    assert by_id.keys() == {"with3", "with-1"}
    answered, refused = by_id["with3"], by_id["with-1"]
    assert (answered["level"], answered["status"], answered["completion_tokens"]) == ("INFO", 200, 3)
    assert "POST /v1/completions 200" in answered["message"]
    assert (refused["level"], refused["status"], refused["error_param"]) == ("WARNING", 400, "max_tokens")


def test_the_proxy_writes_objects_with_request_ids() -> None:
    with Proxy("http://127.0.0.1:9", options=JSON) as proxy:
        proxy.request("GET", "/v1/models", X_Request_Id="mine")
        eventually(lambda: "mine" in proxy.log)
        proxy.stop()
    [entry] = [entry for entry in entries(proxy.log) if "request_id" in entry]
    assert (entry["request_id"], entry["status"], entry["level"]) == ("mine", 503, "ERROR")


def test_an_error_that_ends_a_command_is_an_object_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire", "serve", str(tmp_path / "missing"), *JSON]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    [entry] = entries(done.stderr)
    assert entry["level"] == "ERROR"
    assert "missing" in entry["message"]


def test_tracebacks_are_within_their_object() -> None:
    [caught, in_thread, unhandled] = run(
        "try: 1 / 0\nexcept ZeroDivisionError: logger.exception('Caught\\n%s', 'twice')\n"
        "thread = threading.Thread(target=lambda: [][1]); thread.start(); thread.join()\nint('a')"
    )
    assert caught["message"] == "Caught\ntwice"
    assert caught["traceback"].endswith("ZeroDivisionError: division by zero")
    assert in_thread["traceback"].endswith("IndexError: list index out of range")
    assert unhandled["level"] == "CRITICAL"
    assert "ValueError: invalid literal" in unhandled["traceback"]


def test_what_other_code_logs_or_prints_is_an_object_too() -> None:
    library, warned, printed, partial = run(
        "import sys\nlogging.getLogger('library').warning('late')\nwarnings.warn('old')\n"
        "print('one', end=' ', file=sys.stderr); print('line', file=sys.stderr); print('\\n', file=sys.stderr)\n"
        "print('\\ud800', file=sys.stderr)"
    )
    assert (library["logger"], library["message"]) == ("library", "late")
    assert "UserWarning: old" in warned["message"]
    assert (printed["logger"], printed["message"]) == ("stderr", "one line")
    assert partial["message"] == "\ud800"


def test_an_unknown_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--log-format", "xml"])
    assert "--log-format" in capsys.readouterr().err
