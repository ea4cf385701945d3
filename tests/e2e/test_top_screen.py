"""`quire top` in a pseudo-terminal, looking at a real server."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from support.server import request
from support.server_process import Server
from support.terminal import CTRL_C, terminal

pytestmark = pytest.mark.slow
OPTIONS = ("--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "16M", "--drain-timeout", "0")
SIZE = {"columns": 80, "rows": 24}
WAIT = 300


def begin(server: Server, tokens: int) -> threading.Thread:
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "request_id": "a-story"}
    headers = {"Content-Type": "application/json"}
    asking = threading.Thread(
        target=request, args=(server.url, "POST", "/v1/completions", json.dumps(body).encode()), kwargs=headers
    )
    asking.start()
    return asking


def test_it_shows_requests_survives_the_server_and_leaves_at_q(tmp_path: Path):
    with Server(*OPTIONS, start_timeout=WAIT) as server:
        port = str(server.host_and_port[1])
        with terminal("top", server.url, state=tmp_path, **SIZE) as session:
            session.wait_for("quire-demo", WAIT)
            session.wait_for("no requests", WAIT)
            asking = begin(server, 1900)
            session.wait_for("a-story", WAIT)
            assert server.stop() == 0
            asking.join()
            session.wait_for("Trying again.", WAIT)
            session.wait_for(" lost ", WAIT)
            with Server(*OPTIONS, "--port", port, start_timeout=WAIT) as server:
                session.wait_for(" ready ", WAIT)
                session.type("x")
                session.wait_for("no requests", WAIT)
                assert session.process.poll() is None
                session.type("q")
                assert session.end() == 0
    assert "\x1b[?1049l" in session.screen  # the terminal has its old screen again
    assert "Traceback" not in session.screen


@pytest.mark.nightly
def test_a_key_is_needed_where_the_server_has_one(tmp_path: Path):
    with Server(*OPTIONS, "--api-key", "right", start_timeout=WAIT) as server:
        with terminal("top", server.url, state=tmp_path, **SIZE) as session:
            session.wait_for("the server needs an API key: --api-key KEY", WAIT)
            assert session.end() == 1
        with terminal("top", server.url, state=tmp_path, QUIRE_API_KEY="right", **SIZE) as session:
            session.wait_for("no requests", WAIT)
            session.type(CTRL_C)
            assert session.end() == 0


@pytest.mark.nightly
def test_where_the_page_is_off_metrics_are_shown(tmp_path: Path):
    with (
        Server(*OPTIONS, "--disable-ui", start_timeout=WAIT) as server,
        terminal("top", f"{server.url}/v1", "--api-key", "unused", state=tmp_path, **SIZE) as session,
    ):
        session.wait_for("The server's page is off", WAIT)
        asking = begin(server, 100)
        session.wait_for("50 %", WAIT)
        asking.join()
        session.wait_for("1 length", WAIT)
        os.kill(session.process.pid, signal.SIGINT)
        assert session.end() == 0


def test_another_server_is_an_error(tmp_path: Path):
    import http.server

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        other.RequestHandlerClass.log_message = lambda *arguments: None  # type: ignore[method-assign]
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with terminal("top", f"http://127.0.0.1:{other.server_address[1]}", state=tmp_path, **SIZE) as session:
            session.wait_for("is it a server of Quire?", WAIT)
            assert session.end() == 1
        other.shutdown()
