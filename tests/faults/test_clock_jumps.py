"""The wall clock jumps by a day forth and back while a server works: only the times that it shows change."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from support.fault_requests import SMALL, grammar_seconds, has_torch, post, processes, schema_request, streams
from support.server import request
from support.server_process import Server
from support.waiting import eventually

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
DAY = 86_400
JUMPS = ["+1d", "-1d", "+1d", "+0d", "-1d", "+0d"]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not LIBRARIES, reason="libfaketime, of Debian's package faketime, is not installed"),
]


class Clock:
    """The wall clock of a server and of its cores and ranks, which is a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump("+0d")
        self.environment = {
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds between looks at the file
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, offset: str) -> None:
        """offset: from the real time."""
        new = self._file.with_suffix(".new")
        new.write_text(offset)
        new.replace(self._file)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock")


def test_streams_caches_and_connections_do_not_notice(clock: Clock, tmp_path: Path):
    limits = ["--request-timeout", "600", "--timeout-keep-alive", "60", "--kv-offloading-path", str(tmp_path / "tier")]
    with Server(*SMALL, *limits, *grammar_seconds(600), **clock.environment) as server:
        kept = http.client.HTTPConnection(*server.host_and_port)
        with ThreadPoolExecutor(64) as pool:
            expected = [answer.result() for answer in streams(server, pool, 200)]
            answers = []
            for number, offset in enumerate(JUMPS):
                answers += streams(server, pool, 200)
                clock.jump(offset)
                days = int(offset.removesuffix("d"))
                eventually(lambda days=days: round((_created(kept) - time.time()) / DAY) == days)
                assert schema_request(server, f"a{number}").status == 200
                time.sleep(0.5)
            assert [answer.result() for answer in answers] == expected * len(JUMPS)
        kept.close()
        server.wait_until_idle()
        assert "was lost" not in server.log
        for word in (" 408 ", " 499 ", " 503 ", " 504 ", "Traceback"):
            assert word not in server.log


def _created(connection: http.client.HTTPConnection) -> int:
    """The time in an answer on a connection that stays open."""
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return int(json.loads(connection.getresponse().read())["created"])


@pytest.mark.parametrize("offset", ["+1d", "-1d"])
def test_a_background_response_is_not_taken_for_lost_by_another_api_process(clock: Clock, tmp_path: Path, offset: str):
    store = ["--response-store", str(tmp_path / "responses.sqlite3")]
    with Server(*SMALL, *store, "--api-server-count", "2", **clock.environment) as server:
        core = next(process for process in processes(server, "spawn_main") if has_torch(process))
        body = {"input": "Tell me a story.", "background": True, "max_output_tokens": 200}
        response = post(server, "/v1/responses", body).json
        core.suspend()  # it is replaced after some seconds, in which the response is not complete
        clock.jump(offset)
        statuses = set()

        def is_complete() -> bool:
            found = request(server.url, "GET", f"/v1/responses/{response['id']}").json
            statuses.add(found["status"])
            return found["status"] not in ("queued", "in_progress")

        eventually(is_complete)
        assert statuses <= {"queued", "in_progress", "completed", "incomplete"}
        psutil.wait_procs([core], timeout=60)
