"""`quire serve` with several API processes: one port, the same cores, and nothing lost but what a lost process did."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from quire.config.engine import ConfigError, ServerConfig
from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from quire.server.processes import ApiProcesses
from support.server import eventually
from support.server_process import Server
from support.waiting import LONGEST

pytestmark = pytest.mark.slow

OPTIONS = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M")
PROMPTS = [f"Once upon a time there were {i} little" for i in range(24)]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("-dp", "2", "--api-server-count", "2", *OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> list[str]:
    llm = LLM(dtype="float32", max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def complete(server: Server, prompt: str, tokens: int = 200, stream: bool = False) -> Any:
    """A response, whose connection is new."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    url = f"{server.url}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=LONGEST)


def text(server: Server, prompt: str) -> str:
    """The answer of a stream."""
    with complete(server, prompt, stream=True) as response:
        events = response.read().decode().split("\n\n")
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events if event.startswith("data: {"))


def metric(server: Server, name: str) -> float:
    """The sum over all labels."""
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", server.get("/metrics")[1], re.MULTILINE)))


def processes(server: Server) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """The API processes, and those of the cores, which are the ones that imported torch."""
    children = [p for p in psutil.Process(server.process.pid).children() if "resource_tracker" not in str(p.cmdline())]
    cores = [p for p in children if any("libtorch_cpu" in m.path for m in p.memory_maps())]
    return [p for p in children if p not in cores], cores


def test_all_processes_answer_and_their_metrics_are_added_up(server: Server, expected):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: text(server, prompt), PROMPTS)) == expected
    assert metric(server, "quire:request_success_total") == len(PROMPTS)
    assert metric(server, "quire:generation_tokens_total") == 200 * len(PROMPTS)
    assert metric(server, "http_requests_total") == len(PROMPTS)
    assert metric(server, "quire:num_requests_running") == 0
    shown = re.findall(r'^process_open_fds{process="(.+)"} [1-9]', server.get("/metrics")[1], re.MULTILINE)
    assert sorted(shown) == ["api 0", "api 1", "core 0", "core 1"]
    assert server.log.count("Serving at") == 1
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(LONGEST) == 0
    assert "Traceback" not in server.log


@pytest.mark.nightly
@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_streams_of_all_processes_go_on_when_a_core_is_lost(server: Server, expected, number):
    _, cores = processes(server)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(text, server, prompt) for prompt in PROMPTS]
        eventually(lambda: metric(server, "quire:generation_tokens_total") > len(PROMPTS))
        os.kill(cores[0].pid, number)
        assert [answer.result() for answer in answers] == expected
    eventually(lambda: len(processes(server)[1]) == 2)
    assert server.log.count("Engine core 0 was lost") + server.log.count("Engine core 1 was lost") == 1


@pytest.mark.nightly
def test_a_lost_api_process_is_replaced_and_its_requests_end_in_the_cores(server: Server):
    def try_to_read() -> bool:
        try:
            with complete(server, PROMPTS[0], tokens=450, stream=True) as response:
                return b"[DONE]" in response.read()
        except (OSError, http.client.HTTPException):
            return False

    before, _ = processes(server)
    with ThreadPoolExecutor(32) as pool:
        answers = [pool.submit(try_to_read) for _ in range(32)]
        eventually(lambda: metric(server, "quire:num_requests_running") > 16)
        before[0].kill()
        eventually(lambda: "API process" in server.log)
        complete(server, PROMPTS[0], tokens=1).close()
        read = [answer.result() for answer in answers]
    assert not all(read)
    assert any(read)
    eventually(lambda: len(processes(server)[0]) == 2)
    eventually(lambda: metric(server, "quire:num_requests_running") == 0)
    counted = metric(server, "quire:prefix_cache_queries_total")
    for _ in range(16):  # the new process answers, and counts what it and the other one do
        complete(server, PROMPTS[0], tokens=1).close()
    eventually(lambda: metric(server, "quire:prefix_cache_queries_total") > counted)
    assert metric(server, "quire:prefix_cache_queries_total") < 2 * counted


@pytest.mark.nightly
def test_a_server_whose_processes_cannot_start_ends_with_the_reason():
    with pytest.raises(AssertionError, match=r"--chat-template .missing\.jinja. is neither"):
        Server("--api-server-count", "2", "--chat-template", "missing.jinja", *OPTIONS)


@pytest.mark.parametrize("options", [{"lora_folder": "."}, {"response_store": "memory"}])
def test_options_that_need_one_process_are_refused(options):
    with pytest.raises(ConfigError, match="api_server_count"):
        ApiProcesses(None, ServerConfig.create(api_server_count=2, **options), None)
