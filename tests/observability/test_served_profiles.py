"""Profiles over HTTP: of all replicas, from any process of the API, and when a replica is lost meanwhile."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.engine import cores
from quire.executor import local_ranks, rank
from support.long_traces import SECONDS, LongTraces
from support.server import Host, eventually
from support.server_process import Server
from support.waiting import LONGEST

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[Host]:
    config = {"profiler": "torch", "torch_profiler_dir": str(folder)}
    host = Host(**OPTIONS, data_parallel_size=2, profiler_config=config)
    yield host
    host.close()


def replicas(folder: Path) -> set[str]:
    """The replicas that have traces there, which are deleted."""
    found = set()
    for file in folder.iterdir():
        assert file.name.endswith("-rank0.pt.trace.json.gz")
        found.add(file.name.split("-")[-2])
        file.unlink()
    return found


def test_all_replicas_write_traces(host, folder):
    service = host.serve(enable_admin_api=True)
    assert service.request("POST", "/stop_profile").error["message"] == "no profile runs; start one first"
    answer = service.request("POST", "/start_profile?profile_prefix=night")
    assert (answer.status, answer.json) == (200, {"status": "profiling"})
    again = service.request("POST", "/start_profile")
    assert (again.status, again.error["message"]) == (400, "a profile runs already; stop it first")
    service.complete(["one", "two", "three", "four"], max_tokens=3)
    answer = service.request("POST", "/stop_profile")  # the second start has not dropped the first one
    assert (answer.status, answer.json) == (200, {"status": "stopped", "cores": 2})
    assert all(file.name.startswith("night-") for file in folder.iterdir())
    assert replicas(folder) == {"replica0", "replica1"}


def test_a_benchmark_of_a_server_has_its_run_recorded(host, folder, capsys):
    service = host.serve(enable_admin_api=True)
    flags = ["--base-url", service.url, "--num-prompts", "4", "--input-len", "10", "--output-len", "3"]
    assert main(["bench", "serve", *flags, "--profile"]) == 0
    assert replicas(folder) == {"replica0", "replica1"}
    assert main(["bench", "serve", *flags, "--profile", "--base-url", host.serve().url]) == 1
    assert "/start_profile answers HTTP 403" in capsys.readouterr().err


def test_only_operators_profile(host):
    for path in ("/start_profile", "/stop_profile"):
        assert host.serve().request("POST", path).status == 403


@pytest.mark.nightly
def test_a_lost_replica_loses_its_part_of_the_profile(host, folder, caplog):
    service, client = host.serve(enable_admin_api=True), host.llm.client
    assert service.request("POST", "/start_profile").status == 200
    restarts = client.restarts
    os.kill(client.process_ids[1], signal.SIGKILL)
    eventually(lambda: client.restarts > restarts and len(client.ready) == 2)
    assert service.request("POST", "/stop_profile").json["cores"] == 1
    assert "The profile lacks 1 of 2 cores: no profile runs" in caplog.text
    assert replicas(folder) == {"replica0"}
    assert service.request("POST", "/start_profile").status == 200  # nothing is left of the first one
    assert service.request("POST", "/stop_profile").json["cores"] == 2
    assert replicas(folder) == {"replica0", "replica1"}


@pytest.mark.nightly
def test_processes_that_are_silent_while_they_write_are_not_taken_for_dead(tmp_path):
    """The core by its parent, the ranks by the core, and the core by the ranks."""
    assert max(cores.SILENCE_SECONDS, local_ranks.SILENCE_SECONDS, rank.SILENCE_SECONDS) < SECONDS
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    host = Host(**OPTIONS, tensor_parallel_size=2, profiler_config=config, logits_processors=[LongTraces])
    try:
        service = host.serve(enable_admin_api=True)
        assert service.request("POST", "/start_profile").status == 200
        expected = service.complete("one", max_tokens=3)["choices"]
        assert service.request("POST", "/stop_profile").json["cores"] == 1
        assert {file.name.split(".")[0].split("-")[-1] for file in tmp_path.iterdir()} == {"core", "rank0", "rank1"}
        assert service.complete("one", max_tokens=3)["choices"] == expected
        assert host.llm.client.restarts == 0
    finally:
        host.close()


@pytest.mark.nightly
@pytest.mark.slow
def test_any_process_of_the_api_stops_what_another_has_started(tmp_path):
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(tmp_path)})
    options = ("--api-server-count", "2", "--enable-admin-api", "--profiler-config", config, "--max-model-len", "512")
    statuses = []
    with Server(*options) as server:
        for _ in range(8):  # each connection is taken by any of the processes
            for path in ("/start_profile", "/start_profile", "/stop_profile", "/stop_profile"):
                try:
                    with urllib.request.urlopen(f"{server.url}{path}", b"", timeout=LONGEST) as answer:
                        statuses.append(answer.status)
                except urllib.error.HTTPError as error:
                    statuses.append(error.code)
    assert statuses == [200, 400, 200, 400] * 8
    assert len(list(tmp_path.iterdir())) == 8
