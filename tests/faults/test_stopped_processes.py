"""SIGSTOP of each kind of process: others go on, and the server recovers by itself or goes on after SIGCONT."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from support.fault_requests import (
    PROMPTS,
    SMALL,
    completion,
    grammar_seconds,
    has_torch,
    processes,
    schema_request,
    streams,
)
from support.route import Proxy
from support.server_process import Server
from support.waiting import LONGEST, eventually

STOPPED_SECONDS = 8.0  # longer than a core's parent waits for a sign of it

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with Server(*SMALL) as server:
        return [completion(server, prompt, 400) for prompt in PROMPTS]


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def apis(server: Server) -> list[psutil.Process]:
    return [process for process in processes(server, "spawn_main") if not has_torch(process)]


def test_streams_go_on_after_a_pause_of_the_front_end(expected: list[str]):
    with Server(*SMALL) as server, ThreadPoolExecutor(16) as pool:
        core = server.core.pid
        answers = streams(server, pool)
        eventually(lambda: server.metric("generation_tokens_total") > 0)
        with stopped(psutil.Process(server.process.pid)):
            time.sleep(STOPPED_SECONDS)
        assert [answer.result() for answer in answers] == expected
        assert server.core.pid == core
        assert "was lost" not in server.log


@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        ("spawn_main", []),
        ("spawn_main", ["--data-parallel-size", "2"]),
        ("spawn_main", ["--tensor-parallel-size", "2"]),
        ("quire.executor.rank", ["--tensor-parallel-size", "2"]),
    ],
    ids=["core", "core of two", "core of ranks", "rank"],
)
def test_a_stopped_core_or_rank_is_replaced_and_streams_go_on(expected: list[str], part: str, arguments: list[str]):
    with Server(*SMALL, *arguments) as server, ThreadPoolExecutor(16) as pool:
        victim = processes(server, part)[-1]
        answers = streams(server, pool)
        eventually(lambda: "generation_tokens_total" in server.get("/metrics")[1])
        victim.suspend()
        began = time.monotonic()
        assert [answer.result() for answer in answers] == expected
        print(f"all streams had ended {time.monotonic() - began:.1f} s after the signal")
        eventually(lambda: server.log.count("runs again") == 1, lambda: server.log)
        assert not victim.is_running()


def test_the_parent_of_api_processes_may_be_stopped_while_they_serve(expected: list[str]):
    with Server(*SMALL, "--api-server-count", "2") as server, ThreadPoolExecutor(16) as pool:
        with stopped(psutil.Process(server.process.pid)):
            answers = streams(server, pool)
            time.sleep(STOPPED_SECONDS)
            assert [answer.result() for answer in answers] == expected
        assert server.get("/health")[0] == 200
        time.sleep(1)
        assert "was lost" not in server.log


def test_while_an_api_process_is_stopped_the_other_one_serves(expected: list[str]):
    with Server(*SMALL, "--api-server-count", "2") as server, ThreadPoolExecutor(16) as pool:
        answers = streams(server, pool)
        with stopped(apis(server)[0]):
            for prompt, text in zip(PROMPTS, expected, strict=True):
                assert completion(server, prompt, 400) == text
            time.sleep(STOPPED_SECONDS)
        assert [answer.result() for answer in answers] == expected
        assert "was lost" not in server.log


def test_a_server_with_a_stopped_api_process_ends_when_it_is_told_to():
    with Server(*SMALL, "--api-server-count", "2") as server:
        apis(server)[0].suspend()
        assert server.stop() == 0


def test_streams_go_on_after_a_pause_of_the_proxy(expected: list[str]):
    with Server(*SMALL) as server, Proxy(server.url) as proxy, ThreadPoolExecutor(16) as pool:
        proxy.wait_for_backends(1)
        answers = streams(proxy, pool)
        with stopped(psutil.Process(proxy.process.pid)):
            time.sleep(STOPPED_SECONDS)
        assert [answer.result() for answer in answers] == expected
        assert completion(proxy, PROMPTS[0], 400) == expected[0]


def test_a_stopped_launcher_of_worker_processes_is_replaced(expected: list[str]):
    with Server(*SMALL, *grammar_seconds(60)) as server, ThreadPoolExecutor(16) as pool:
        assert schema_request(server, "first").status == 200
        [launcher] = processes(server, "untrusted.launcher")
        launcher.suspend()
        began = time.monotonic()
        refused = pool.submit(schema_request, server, "second")
        assert [answer.result() for answer in streams(server, pool)] == expected
        assert (refused.result().status, refused.result().error["code"]) == (503, "server_overloaded")
        print(f"refused after {time.monotonic() - began:.1f} s")
        eventually(lambda: schema_request(server, f"later {time.monotonic()}").status == 200)
        print(f"grammars are compiled again after {time.monotonic() - began:.1f} s")
        assert not launcher.is_running()


def test_a_stopped_job_of_the_worker_processes_fails_alone():
    with Server(*SMALL, *grammar_seconds(60)) as server, ThreadPoolExecutor(16) as pool:
        assert schema_request(server, "first").status == 200
        [launcher] = processes(server, "untrusted.launcher")
        victim = None
        answers = []
        while victim is None:  # a job takes some milliseconds
            answers += [pool.submit(schema_request, server, f"name {len(answers) + i}") for i in range(8)]
            end = time.monotonic() + 0.5
            while victim is None and time.monotonic() < end:
                victim = _stop_one(launcher)
        began = time.monotonic()
        statuses = [answer.result().status for answer in answers]
        print(f"the last of {len(statuses)} was answered after {time.monotonic() - began:.1f} s")
        assert sorted(statuses)[:-1] == [200] * (len(statuses) - 1)
        assert statuses.count(503) == 1
        assert schema_request(server, "last").status == 200
        psutil.wait_procs([victim], timeout=LONGEST)
        assert not victim.is_running()


def _stop_one(launcher: psutil.Process) -> psutil.Process | None:
    for job in launcher.children():
        try:
            job.send_signal(signal.SIGSTOP)
            while (status := job.status()) != psutil.STATUS_ZOMBIE:
                if status == psutil.STATUS_STOPPED:
                    return job
        except psutil.NoSuchProcess:
            continue
    return None
