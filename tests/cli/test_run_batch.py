"""`quire run-batch`, as a process."""

from __future__ import annotations

import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from support.waiting import LONGEST

pytestmark = pytest.mark.texts

OPTIONS = ["--dtype", "float32", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64M"]


def command(source: object, target: object, *options: str) -> list[str]:
    return [sys.executable, "-m", "quire", "run-batch", "-i", str(source), "-o", str(target), *OPTIONS, *options]


def run_batch(source: object, target: object, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(source, target, *options),
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def completion(custom_id: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def answers(path: Path) -> dict[str | None, Any]:
    """The answers of an output file by their custom_id. No two answers may have the same."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


@pytest.mark.slow
def test_each_request_gets_its_answer_and_each_wrong_line_an_error(tmp_path: Path):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    response = {"input": "Hi", "max_output_tokens": 4, "temperature": 0}
    lines = [
        json.dumps(completion("plain", "Once upon a time")),
        "",
        json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        '{"custom_id": "torn", "method": "POST"',
        json.dumps({**completion("no such url", "a"), "url": "/v1/embeddings"}),
        json.dumps({**completion("wrong method", "a"), "method": "GET"}),
        json.dumps(completion("wrong field", "a", temperature=-1)),
        json.dumps(completion("wrong model", "a", model="other")),
        json.dumps(completion("stream", "a", stream=True)),
        json.dumps({**completion("no body", "a"), "body": None}),
        json.dumps(completion("too long", "a" * 5000)),
        json.dumps({**completion("response", ""), "url": "/v1/responses", "body": response}),
        json.dumps({**completion("background", ""), "url": "/v1/responses", "body": {**response, "background": True}}),
        json.dumps(completion("last line without an end", "Once upon a time", max_tokens=2)),
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    done = run_batch(
        source, target, "--max-body-bytes", "4000", "--served-model-name", "demo", XDG_STATE_HOME=str(tmp_path)
    )
    assert done.returncode == 0
    assert "13 requests are answered, 9 with an error\n" in done.stderr
    by_id = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    texts = LLM(dtype="float32").generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4))
    plain = by_id["plain"]
    assert plain["error"] is None
    assert plain["response"]["status_code"] == 200
    assert plain["response"]["body"]["choices"][0]["text"] == texts[0].outputs[0].text
    assert plain["response"]["body"]["id"] == f"cmpl-{plain['response']['request_id']}"
    assert by_id["chat"]["response"]["body"]["object"] == "chat.completion"
    said = by_id["response"]["response"]["body"]["output"][0]["content"][0]["text"]
    assert said == by_id["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert by_id["last line without an end"]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]  # nothing else is stored
    errors = {line["id"]: line for line in map(json.loads, target.read_text().splitlines()) if line["error"]}
    assert all(line["response"]["body"] == {"error": line["error"]} for line in errors.values())
    found = {
        name: (line["custom_id"], line["response"]["status_code"], line["error"]["param"])
        for name, line in errors.items()
    }
    assert found == {
        "batch_req_4": (None, 400, None),
        "batch_req_5": ("no such url", 400, "url"),
        "batch_req_6": ("wrong method", 400, "method"),
        "batch_req_7": ("wrong field", 400, "temperature"),
        "batch_req_8": ("wrong model", 404, "model"),
        "batch_req_9": ("stream", 400, "body.stream"),
        "batch_req_10": ("no body", 400, None),
        "batch_req_11": (None, 413, None),
        "batch_req_13": ("background", 400, "body.background"),
    }
    assert errors["batch_req_4"]["error"]["message"] == "the line is not a JSON object"
    assert errors["batch_req_11"]["error"]["message"] == "the line has more than 4000 bytes"


@pytest.mark.nightly
@pytest.mark.slow
def test_lines_are_answered_once_however_often_the_batch_is_killed(tmp_path: Path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    count = 120
    write(source, [completion(f"request {i}", f"Story {i}", max_tokens=20 + i % 50) for i in range(count)])
    draw = random.Random(0)
    for goal in (1, 20, 40):  # answers, from which on it is killed; it has at least twice as many to give
        process = subprocess.Popen(
            command(source, target), stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        while process.poll() is None and (not target.exists() or target.read_bytes().count(b"\n") < goal):
            time.sleep(0.005)
        assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=LONGEST)
        assert not alive
        if goal == 20:  # as if the kill had come within a write
            os.truncate(target, os.path.getsize(target) - draw.randint(1, 300))
    before = target.read_bytes()
    done = run_batch(source, target)
    assert done.returncode == 0
    assert "120 requests are answered, 0 with an error\n" in done.stderr
    assert target.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    by_id = answers(target)
    assert by_id.keys() == {f"request {i}" for i in range(count)}
    assert [by_id[f"request {i}"]["response"]["body"]["usage"]["completion_tokens"] for i in range(count)] == [
        20 + i % 50 for i in range(count)
    ]
    again = run_batch(source, target, "--model", "/no/such/model")  # nothing is left to do: no model is loaded
    assert (again.returncode, answers(target)) == (0, by_id)


@pytest.mark.slow
def test_ctrl_c_stops_the_batch_and_says_how_to_go_on(tmp_path: Path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, [completion(str(i), "Once", max_tokens=1000, ignore_eos=True) for i in range(50)])
    process = subprocess.Popen(command(source, target), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "Requests:   0%" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    log = process.stderr.read()
    assert process.wait(LONGEST) == 130
    assert "the same command goes on with the other " in log
    assert "Traceback" not in log
    assert "ERROR" not in log


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """A server whose files can be read with GET and written with PUT. /refused is not writable."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            (folder / self.path[1:]).write_bytes(body)
            self.send_response(403 if self.path == "/refused" else 201)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.nightly
def test_input_and_output_may_be_urls(tmp_path: Path):
    web, state = tmp_path / "web", tmp_path / "state"
    web.mkdir()
    write(web / "in.jsonl", [completion("a", "Once"), completion("b", "Twice")])
    with web_server(web) as url:
        done = run_batch(f"{url}/in.jsonl", f"{url}/refused", XDG_STATE_HOME=str(state))
        assert done.returncode == 1
        assert (
            f"{url}/refused cannot be written: HTTP Error 403: Forbidden; the same command tries again" in done.stderr
        )
        [kept] = state.rglob("*.jsonl")
        assert answers(kept).keys() == {"a", "b"}
        done = run_batch(f"{url}/in.jsonl", f"{url}/out.jsonl", "--output-tmp-dir", str(tmp_path / "new"))
        assert done.returncode == 0, done.stderr
        assert answers(web / "out.jsonl").keys() == {"a", "b"}
        assert not any((tmp_path / "new").iterdir())
        done = run_batch(f"{url}/missing", tmp_path / "out.jsonl")
        assert done.returncode == 1
        assert f"{url}/missing cannot be read: HTTP Error 404" in done.stderr


def test_files_that_cannot_be_used_are_an_error_before_the_model_is_loaded(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [completion("a", "Once")])
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    missing = run_batch(tmp_path / "missing.jsonl", tmp_path / "out.jsonl")
    nowhere = run_batch(source, tmp_path / "no folder" / "out.jsonl")
    foreign = run_batch(source, other)
    for done, message in (
        (missing, f"there is no file {tmp_path}/missing.jsonl"),
        (nowhere, "No such file or directory"),
        (foreign, f"{other}: line 1 is not an answer to a request in {source}; name another output file"),
    ):
        assert done.returncode == 1
        assert message in done.stderr
        assert "KV cache" not in done.stderr
    assert other.read_text() == "mine"


@pytest.mark.slow
def test_a_full_disk_ends_the_batch_with_an_error(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [completion(str(i), "Once") for i in range(20)])
    done = run_batch(source, "/dev/full")
    assert done.returncode == 1
    assert "quire: error: [Errno 28] No space left on device: '/dev/full'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "0 requests are answered, 0 with an error; the same command goes on with the other 20" in done.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_lines(tmp_path: Path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with open(source, "w") as file:
        for i in range(10_000):
            file.write(json.dumps(completion(str(i), "Once", max_tokens=1, user="x" * 10_000)) + "\n")
    process = subprocess.Popen(command(source, target), stderr=subprocess.DEVNULL)
    sizes = []  # while it has more than a fifth of the answers
    while process.poll() is None:
        if target.exists() and target.read_bytes().count(b"\n") > 2000:
            sizes.append(psutil.Process(process.pid).memory_info().rss)
        time.sleep(0.2)
    assert process.wait(LONGEST) == 0
    assert len(answers(target)) == 10_000
    assert max(sizes[1:]) < sizes[0] + (20 << 20)  # the file has 100 MB
