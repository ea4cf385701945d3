"""A server that hangs says so, and goes on without the request that is the reason."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from support.server import Answer, request
from support.server_process import Server
from support.waiting import eventually

pytestmark = pytest.mark.slow

TIMEOUT = 2  # seconds
ARGUMENTS = [
    "--dtype",
    "float32",
    "--logits-processors",
    "support.hangs:Hangs",
    "--watchdog-timeout",
    str(TIMEOUT),
    "--enable-admin-api",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*ARGUMENTS) as server:
        complete(server, 2)
        yield server


def complete(server: Server, tokens: int, **xargs: Any) -> Answer:
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    if xargs:
        body["vllm_xargs"] = xargs
    return request(
        server.url, "POST", "/v1/completions", json.dumps(body).encode(), **{"Content-Type": "application/json"}
    )


class Streams:
    """Answers that are made meanwhile."""

    def __init__(self, server: Server, count: int, tokens: int = 600) -> None:
        self.answers: list[Answer] = []
        make = lambda: self.answers.append(complete(server, tokens))  # noqa: E731
        self._threads = [threading.Thread(target=make) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        eventually(lambda: server.metric("num_requests_running") == count)

    def finish(self) -> list[str]:
        for thread in self._threads:
            thread.join()
        assert {answer.status for answer in self.answers} == {200}, [answer.body for answer in self.answers]
        return [answer.json["choices"][0]["text"] for answer in self.answers]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", ["sleep", "locked"])
def test_the_request_that_makes_a_step_hang_is_the_only_one_that_fails(server, fault):
    before, logged = server.metric("engine_restarts_total"), len(server.log)
    others = Streams(server, 3)
    health = set()
    done = threading.Event()

    def probe() -> None:
        while not done.wait(0.02):
            health.add(server.get("/health")[0])

    thread = threading.Thread(target=probe)
    thread.start()
    answer = complete(server, 20, fault=fault, at=3)
    assert len(set(others.finish())) == 1
    done.set()
    thread.join()
    assert answer.status == 500
    assert "failed twice" in answer.error["message"]
    assert health == {200, 503}
    assert server.metric("engine_restarts_total") == before + 2
    server.wait_until_idle()
    log = server.log[logged:]
    assert "The threads of core 0" in log
    assert "hangs.py" in log
    assert ("completed no step" if fault == "sleep" else "silent") in log


def test_two_such_requests_do_not_end_the_server(server):
    others = Streams(server, 2)
    answers: list[Answer] = []
    culprits = [
        threading.Thread(target=lambda: answers.append(complete(server, 20, fault="exception", at=0))) for _ in range(3)
    ]
    for culprit in culprits:
        culprit.start()
    for culprit in culprits:
        culprit.join()
    assert [answer.status for answer in answers] == [500] * 3
    assert len(set(others.finish())) == 1
    eventually(lambda: server.get("/health")[0] == 200)
    server.wait_until_idle()


@pytest.mark.nightly
def test_they_do_not_end_an_idle_server_either(server):
    for _ in range(2):
        assert complete(server, 20, fault="exception", at=0).status == 500
    eventually(lambda: server.get("/health")[0] == 200)
    assert complete(server, 2).status == 200


def test_a_stopped_core_is_replaced_and_tells_where_it_was(server):
    logged = len(server.log)
    streams = Streams(server, 2)
    server.core.send_signal(signal.SIGSTOP)
    eventually(lambda: server.get("/health")[0] == 503)
    assert len(set(streams.finish())) == 1
    assert "The threads of core 0" in server.log[logged:]


def test_a_server_without_work_that_sleeps_or_is_stopped_as_a_whole_is_not_restarted(server):
    before = server.metric("engine_restarts_total")
    core = server.core.pid
    time.sleep(2 * TIMEOUT)  # the watchdog must have had time to bark
    assert request(server.url, "POST", "/sleep?level=1").status == 200
    time.sleep(2 * TIMEOUT)
    assert request(server.url, "POST", "/wake_up").status == 200
    streams = Streams(server, 2, tokens=1500)
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in family:
            os.kill(process.pid, number)
        time.sleep(6)  # longer than a silent core is waited for
    assert len(set(streams.finish())) == 1
    assert server.core.pid == core
    assert server.metric("engine_restarts_total") == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hang", ["stopped", "in a step"])
def test_a_rank_that_hangs_is_replaced_and_tells_where_it_was(hang):
    with Server(*ARGUMENTS, "--tensor-parallel-size", "2") as server:
        complete(server, 2)
        streams = Streams(server, 2)
        if hang == "stopped":
            ranks = [p for p in server.core.children() if "quire.executor.rank" in p.cmdline()]
            max(ranks, key=lambda process: process.cmdline()[-1]).send_signal(signal.SIGSTOP)
        else:
            assert complete(server, 20, fault="rank 1", at=3).status == 500
        assert len(set(streams.finish())) == 1
        eventually(lambda: server.get("/health")[0] == 200)
        assert server.metric("engine_restarts_total") == (1 if hang == "stopped" else 2)
        assert "The threads of rank 1" in server.log
