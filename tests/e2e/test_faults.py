"""Each fault in the middle of 32 open streams: nothing is lost, nothing hangs, no block leaks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import psutil
import pytest

from support.server_process import Server
from support.streams import MODEL, all_streams
from support.waiting import LONGEST, eventually

pytestmark = pytest.mark.slow

ARGUMENTS = ["--served-model-name", MODEL, "--dtype", "float32", "--logits-processors", "support.faults:Faults"]


@pytest.fixture(scope="module")
def server():
    with Server(*ARGUMENTS) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: Server) -> list[tuple[str, str]]:
    made = asyncio.run(all_streams(server.url))
    assert all(reason == "length" for _, reason in made)
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_streams_go_on_when_the_core_is_killed_or_stopped(server, expected, number):
    assert asyncio.run(all_streams(server.url, lambda: server.core.send_signal(number))) == expected
    server.wait_until_idle()
    assert server.get("/health")[0] == 200


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("lost", "number"),
    [
        (0, signal.SIGSTOP),
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.nightly),
    ],
)
def test_streams_go_on_when_a_stage_of_a_pipeline_is_killed_or_stopped(expected, lost, number):
    with Server(*ARGUMENTS, "--pipeline-parallel-size", "2") as server:
        before = server.core.pid
        ranks = [p for p in server.core.children() if "quire.executor.rank" in p.cmdline()]
        ranks.sort(key=lambda process: process.cmdline()[-1])
        assert asyncio.run(all_streams(server.url, lambda: ranks[lost].send_signal(number))) == expected
        assert server.core.pid != before
        server.wait_until_idle()


# tests/engine/test_async_llm.py tries all of them without a server.
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "fault", ["exception", *(pytest.param(f, marks=pytest.mark.slow) for f in ("stop", "memory", "kill"))]
)
def test_streams_go_on_after_a_fault_inside_a_step(server, expected, tmp_path: Path, fault):
    extra = {"vllm_xargs": {"fault": fault, "at": 40, "once": str(tmp_path / "done")}}
    assert asyncio.run(all_streams(server.url, **extra)) == expected
    assert (tmp_path / "done").exists()
    server.wait_until_idle()


def test_health_is_503_while_the_core_is_restarted(server):
    server.core.kill()
    eventually(lambda: server.get("/health")[0] == 503)
    eventually(lambda: server.get("/health")[0] == 200)


def test_a_request_that_brings_the_core_down_twice_is_refused_and_the_server_goes_on(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.InternalServerError, match="failed twice"):
        client.completions.create(
            model=MODEL, prompt="a", max_tokens=20, extra_body={"vllm_xargs": {"fault": "exception", "at": 3}}
        )
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=5).choices[0].finish_reason
    server.wait_until_idle()


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(expected):
    with Server(*ARGUMENTS) as server:
        core = server.core
        made = asyncio.run(all_streams(server.url, lambda: server.process.send_signal(signal.SIGTERM)))
        assert made == expected
        assert server.process.wait(LONGEST) == 0
        psutil.wait_procs([core], timeout=LONGEST)
        assert not core.is_running()


def test_a_killed_server_leaves_no_core_behind():
    with Server(*ARGUMENTS) as server:
        core = server.core
        server.process.kill()
        server.process.wait()
        psutil.wait_procs([core], timeout=LONGEST)
        assert not core.is_running()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "port"),
        (["--host", "no.such.host.invalid"], "cannot listen on"),
        (["no/such/model"], "no/such/model"),
        (["--ssl-keyfile", "/dev/null", "--ssl-certfile", "/dev/null"], "--ssl-keyfile"),
        (["--kv-cache-memory-bytes", "1000T"], "--kv-cache-memory-bytes"),
        (["--max-model-len", "1M"], "--max-model-len"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(arguments, message):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=LONGEST,
        env=environment,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("quire: error:")
    assert message in last
    assert "Traceback" not in done.stderr
