"""Each folder that a server writes, full or read-only: what needs the folder fails alone, or goes on without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from quire.checkpoints.hub import bundled_model
from quire.platform.folders import cache_folder
from support.disks import Disk
from support.fault_requests import PROMPT, SMALL, completion, has_torch, post, processes
from support.hub import Hub
from support.server import Answer, request
from support.server_process import Server
from support.waiting import LONGEST, eventually

FULL = "No space left on device"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def respond(server: Server, **fields: Any) -> Answer:
    return post(server, "/v1/responses", {"input": "Tell me a story.", "max_output_tokens": 16, **fields})


def error_at_start(*arguments: str, wrapper: list[str], **environment: str) -> str:
    """The last line of the log of a server that cannot start."""
    done = subprocess.run(
        [*wrapper, sys.executable, "-m", "quire", "serve", "--port", "0", *SMALL, *arguments],
        capture_output=True,
        text=True,
        timeout=LONGEST,
        env={**os.environ, **environment},
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert (done.returncode, last.startswith("quire: error:")) == (1, True), done.stderr
    assert "Traceback" not in done.stderr
    return last


# ---- at start


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--access-log", "{}/access.log"], marks=pytest.mark.slow),
        pytest.param(["--uds", "{}/socket"], marks=pytest.mark.nightly),
        pytest.param(["--response-store", "{}/responses.sqlite3"], marks=pytest.mark.nightly),
        pytest.param(["--kv-offloading-path", "{}/blocks"], marks=pytest.mark.nightly),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_read_only_folder_that_was_asked_for_is_an_error_at_start_that_names_it(folder: Path, arguments: list[str]):
    option, path = arguments[0], arguments[1].format(folder)
    line = error_at_start(option, path, wrapper=Disk(folder, read_only=True).wrapper)
    assert option in line
    assert str(folder) in line or "response_store" in line or "--response-store" in line


@pytest.mark.nightly
def test_a_read_only_folder_for_traces_fails_the_request_for_a_trace(folder: Path):
    profiler = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder)})
    wrapper = Disk(folder, read_only=True).wrapper
    with Server(*SMALL, "--enable-admin-api", "--profiler-config", profiler, wrapper=wrapper) as server:
        refused = post(server, "/start_profile", {})
        assert refused.status == 400
        assert str(folder) in refused.error["message"]
        assert completion(server)


@pytest.mark.nightly
def test_a_read_only_temporary_folder_is_not_used(folder: Path):
    with Server(*SMALL, wrapper=Disk(folder, read_only=True).wrapper, TMPDIR=str(folder)) as server:
        expected = completion(server)
        server.core.kill()
        assert completion(server) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["read-only", "small"])
def test_without_a_cache_folder_kernels_are_compiled_for_this_start_alone(folder: Path, kind: str):
    disk = Disk(folder, read_only=kind == "read-only")
    with Server(*SMALL, wrapper=disk.wrapper, XDG_CACHE_HOME=str(folder)) as server:
        assert server.log.count("The compiled CPU kernels cannot be kept") == 1
        assert completion(server)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["read-only", "small"])
def test_a_model_whose_files_cannot_be_downloaded_is_an_error_that_says_so(folder: Path, tmp_path: Path, kind: str):
    shutil.copytree(bundled_model(), tmp_path / "hub" / "owner" / "name")
    disk = Disk(folder, read_only=kind == "read-only")
    with Hub(tmp_path / "hub") as hub:
        environment = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        line = error_at_start("owner/name", "--download-dir", str(folder), wrapper=disk.wrapper, **environment)
    assert "owner/name" in line
    assert ("Read-only file system" if kind == "read-only" else FULL) in line


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["read-only", "small"])
def test_weights_that_cannot_be_kept_are_used(folder: Path, tmp_path: Path, kind: str):
    config = Qwen3Config(**json.loads((bundled_model() / "config.json").read_text()) | {"intermediate_size": 12_800})
    model = tmp_path / "model"
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(model)  # 100 MB
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model() / name, model)
    with Server(str(model), *SMALL, "--no-weight-cache") as server:
        expected = completion(server)
    cache = tmp_path / "cache" / "quire"
    cache.mkdir(parents=True)
    (cache / "kernels").symlink_to(cache_folder() / "kernels")
    disk = Disk(cache / "weights", read_only=kind == "read-only")
    environment = {"XDG_CACHE_HOME": str(cache.parent)}
    with Server(str(model), *SMALL, wrapper=disk.wrapper, **environment) as server:
        eventually(lambda: server.log.count("The packed weights are not kept for later starts") == 1)
        assert completion(server) == expected


# ---- the store of responses


@pytest.mark.slow
def test_while_the_disk_of_the_response_store_is_full_responses_are_not_stored(folder: Path):
    disk = Disk(folder)
    store = str(folder / "responses.sqlite3")
    with Server(*SMALL, "--response-store", store, wrapper=disk.wrapper) as server:
        disk.of(server.process.pid)
        before = respond(server).json
        assert before["store"]
        disk.fill()
        while_full = [respond(server) for _ in range(8)]
        assert all(answer.status == 200 for answer in while_full)
        assert not while_full[-1].json["store"]
        in_background = respond(server, background=True)
        assert (in_background.status, in_background.error["code"]) == (503, "store_unavailable")
        assert completion(server)
        disk.free()
        after = respond(server).json
        assert after["store"]
        for response in (before, after):
            stored = request(server.url, "GET", f"/v1/responses/{response['id']}")
            assert (stored.status, stored.json["output"]) == (200, response["output"])
        found = re.search("its response was not stored: (.*)", server.log)
        assert found
        print(f"the log's reason: {found[1]}")
        assert "Traceback" not in server.log


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["read-only", "full"])
def test_without_its_folder_the_default_response_store_is_in_memory(folder: Path, kind: str):
    disk = Disk(folder, read_only=kind == "read-only")
    with Server(*SMALL, wrapper=disk.wrapper, XDG_STATE_HOME=str(folder)) as server:
        if kind == "full":
            disk.of(server.process.pid).fill()
        stored = respond(server).json
        assert stored["store"]
        assert request(server.url, "GET", f"/v1/responses/{stored['id']}").status == 200
        assert server.log.count("Responses are kept in memory until the server ends") == 1


# ---- logs


@pytest.mark.nightly
def test_a_full_disk_of_the_access_log_is_logged_once_and_breaks_no_line(folder: Path):
    disk = Disk(folder)
    with Server(*SMALL, "--access-log", str(folder / "access.log"), wrapper=disk.wrapper) as server:
        log = disk.of(server.process.pid).path / "access.log"
        completion(server)
        disk.fill()
        for _ in range(100):
            completion(server, tokens=1)
        assert server.log.count("access.log cannot be written, and lacks lines") == 1
        disk.free()
        completion(server)
        eventually(lambda: "access.log is written again; it lacks" in server.log)
        lines = [line for line in log.read_text().splitlines() if line]
        whole = re.compile(r'127\.0\.0\.1 - - \[.+\] "POST /v1/completions HTTP/1\.1" 200 \d+ "-" "-"')
        assert sum(not whole.fullmatch(line) for line in lines) <= 1  # the last one before the disk was full
        assert whole.fullmatch(lines[0])
        assert whole.fullmatch(lines[-1])
        assert "Traceback" not in server.log


@pytest.mark.nightly
def test_a_server_whose_own_log_cannot_be_written_answers(folder: Path):
    ready = folder.with_name("ready")  # its log is lost, so nobody could read a port
    command = [sys.executable, "-m", "quire", "serve", *SMALL, "--uds", str(ready), "--access-log", "-"]
    with Path("/dev/full").open("w") as full:
        server = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        curl = ["curl", "-sS", "--unix-socket", str(ready), "http://x/v1/models"]

        def models() -> bool:
            assert server.poll() is None
            return b'"quire-demo"' in subprocess.run(curl, capture_output=True).stdout

        eventually(models)
        assert all(models() for _ in range(20))
    finally:
        server.terminate()
    assert server.wait(LONGEST) == 0


# ---- temporary files


@pytest.mark.slow
def test_a_full_temporary_folder_does_not_keep_a_lost_core_from_coming_back(folder: Path):
    disk = Disk(folder)
    arguments = [*SMALL, "--logits-processors", "support.faults:Faults"]
    with Server(*arguments, wrapper=disk.wrapper, TMPDIR=str(folder)) as server:
        disk.of(server.process.pid).fill()
        expected = completion(server)
        server.core.kill()
        assert completion(server) == expected
        faulty = {"prompt": PROMPT, "max_tokens": 20, "vllm_xargs": {"fault": "exception", "at": 3}}
        answer = post(server, "/v1/completions", faulty)
        assert (answer.status, answer.error["code"]) == (500, "request_failed")
        assert completion(server) == expected


@pytest.mark.nightly
def test_several_api_processes_serve_while_the_disk_of_their_metrics_is_full(folder: Path):
    disk = Disk(folder)
    with Server(*SMALL, "--api-server-count", "2", wrapper=disk.wrapper, TMPDIR=str(folder)) as server:
        disk.of(server.process.pid).fill()
        for number in range(30):
            assert completion(server, tokens=1)
            assert post(server, f"/v1/{number}", {}).status == 404
            assert respond(server).status == 200
        api = next(p for p in processes(server, "spawn_main") if not has_torch(p))
        api.kill()
        eventually(lambda: "API process" in server.log)
        for _ in range(30):
            assert completion(server, tokens=1)
        assert server.get("/metrics")[0] == 200
        assert server.log.count(" was lost") == 1
        assert "The metrics of this process cannot be shown from now on" in server.log


# ---- blocks and traces


@contextmanager
def tier_on(folder: Path, size: str) -> Iterator[tuple[Server, Disk, list[str], list[str]]]:
    """A server whose blocks go to a disk of its own, and prompts that it has completed, with their completions."""
    disk = Disk(folder, size)
    prompts = [f"{number} " + "word " * 100 for number in range(8)]
    with Server(*SMALL[:-1], "4M", "--kv-offloading-path", str(folder), wrapper=disk.wrapper) as server:
        disk.of(server.process.pid)
        yield server, disk, prompts, [completion(server, prompt) for prompt in prompts]


@pytest.mark.nightly
def test_a_full_disk_tier_keeps_what_it_has(folder: Path):
    with tier_on(folder, "4m") as (server, disk, prompts, expected):
        disk.fill()
        for number in range(8):  # others, which push those out of the cache
            completion(server, f"other {number} " + "word " * 300)
        assert [completion(server, prompt) for prompt in prompts] == expected
        assert server.log.count("KV blocks cannot be saved to") == 1
        disk.free()
        for path in disk.path.rglob("*"):
            assert not path.name.startswith("."), "an unfinished file was left"


@pytest.mark.nightly
def test_a_disk_tier_that_becomes_read_only_is_read(folder: Path):
    with tier_on(folder, "32m") as (server, disk, prompts, expected):
        for number in range(8):
            completion(server, f"other {number} " + "word " * 300)
        disk.remount("ro")
        assert [completion(server, prompt) for prompt in prompts] == expected
        assert "cannot be used, and is computed" not in server.log
        completion(server, "something new " + "word " * 100)
        assert re.findall(r"\((\d+) cached\)", server.log)[-2] != "0"


@pytest.mark.nightly
def test_a_trace_that_does_not_fit_fails_alone_and_leaves_nothing(folder: Path):
    disk = Disk(folder)
    profiler = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_use_gzip": False})
    with Server(*SMALL, "--enable-admin-api", "--profiler-config", profiler, wrapper=disk.wrapper) as server:
        disk.of(server.process.pid).fill()
        assert post(server, "/start_profile", {}).status == 200
        expected = completion(server)
        refused = post(server, "/stop_profile", {})
        assert refused.status == 400
        assert str(folder) in refused.error["message"]
        assert completion(server) == expected
        disk.free()
        assert list(disk.path.iterdir()) == []


@pytest.mark.nightly
def test_a_batch_whose_output_does_not_fit_ends_with_an_error_and_is_continued(folder: Path, tmp_path: Path):
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "quire-demo", "prompt": PROMPT, "max_tokens": 8},
        }
        for i in range(60)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = folder / "out.jsonl"
    disk = Disk(folder, "16k")
    command = [sys.executable, "-m", "quire", "run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(output)]
    kept = tmp_path / "kept.jsonl"
    script = f'"$@"; status=$?; cp {output} {kept}; exit $status'
    done = subprocess.run([*disk.wrapper, "sh", "-c", script, "sh", *command], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{output}" in done.stderr
    assert FULL in done.stderr
    assert "Traceback" not in done.stderr
    command[-1] = str(kept)
    assert subprocess.run(command, capture_output=True).returncode == 0
    answers = [json.loads(line) for line in kept.read_text().splitlines()]
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(60))
    assert all(answer["error"] is None for answer in answers)
