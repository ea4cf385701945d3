"""A server that is told to end while worker processes decode slow media, or run other jobs."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from typing import Any

import psutil
import pytest

from support.media_bombs import data_url, jpeg_of_scans
from support.server_process import Server
from support.waiting import LONGEST, eventually

pytestmark = pytest.mark.slow


def _post(url: str, body: dict[str, Any], answers: list[tuple[int, str]]) -> None:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=LONGEST) as response:
            answers.append((response.status, response.read().decode()))
    except urllib.error.HTTPError as error:
        answers.append((error.code, error.read().decode()))


def _jobs(server: Server) -> list[psutil.Process]:
    """The processes of jobs that have used some processor time."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    launchers = [process for process in family if "quire.platform.untrusted.launcher" in process.cmdline()]
    jobs = [job for launcher in launchers for job in launcher.children()]
    return [job for job in jobs if job.cpu_times().user > 0.1]


def _ask(server: Server, num_scans: int, answers: list[tuple[int, str]]) -> threading.Thread:
    content = [{"type": "image_url", "image_url": {"url": data_url(jpeg_of_scans(2000, num_scans))}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    thread = threading.Thread(target=_post, args=(f"{server.url}/v1/chat/completions", body, answers))
    thread.start()
    return thread


OPTIONS = ("quire-demo/vision", "--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20))


def test_a_drain_ends_slow_jobs_in_time():
    answers: list[tuple[int, str]] = []
    with Server(*OPTIONS, "--shutdown-timeout", "0.2") as server:
        threads = [_ask(server, 20_000, answers) for _ in range(2)]  # half a minute of processor time each
        jobs = eventually(lambda: len(_jobs(server)) == 2 and _jobs(server))
        assert server.stop() == 0
        for thread in threads:
            thread.join()
        _, alive = psutil.wait_procs(jobs, timeout=LONGEST)
        assert not alive
        assert "Shutting down: waiting up to 0.2 s for 2 running requests." in server.log
        assert "the drain timeout of 0.2 s is over, ending 2 running requests" in server.log
        for status, answer in answers:
            assert (status, json.loads(answer)["error"]["code"]) == (503, "shutting_down")
        assert len(answers) == 2


def test_a_drain_waits_for_media_that_are_decoded():
    answers: list[tuple[int, str]] = []
    with Server(*OPTIONS, "--shutdown-timeout", str(LONGEST)) as server:
        thread = _ask(server, 1_000, answers)
        eventually(lambda: _jobs(server) or answers)
        assert server.stop() == 0
        thread.join()
    assert [status for status, _ in answers] == [200], answers
