"""How a server starts: the core first, no torch in the API process, and nothing left of a start that failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.container import can_unshare
from support.server import eventually, request
from support.server_process import Server
from support.waiting import LONGEST

MEGABYTES = 1_000_000
REQUESTS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 8, "logprobs": 5, "echo": True}, 200),
    ("/v1/completions", {"prompt": ["Once", "There"], "n": 3, "max_tokens": 8, "stream": True}, 200),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 8, "prompt_logprobs": 3, "bad_words": ["the"]}, 200),
    ("/v1/completions", {"prompt": "Once", "logits_processors": ["no.such.processor"]}, 400),
    ("/v1/completions", {"prompt": "Once " * 10_000}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "n": 2}, 200),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            "logprobs": True,
            "top_logprobs": 4,
            "logit_bias": {"5": 1.5},
            "min_tokens": 2,
            "stream": True,
        },
        200,
    ),
    ("/tokenize", {"prompt": "Once upon a time"}, 200),
    ("/detokenize", {"tokens": [1, 2, 3]}, 200),
]
PATHS = ["/v1/models", "/metrics", "/health", "/openapi.json", "/version"]


@pytest.mark.slow
def test_the_api_process_never_imports_torch_and_stays_small(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, pathlib, sys\n"
        "def report():\n"
        "    pathlib.Path(__file__).with_name(f'{os.getpid()}.txt').write_text(str('torch' in sys.modules))\n"
        "atexit.register(report)\n"
    )
    with Server(PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[1]}") as server:
        for path, body, status in REQUESTS:
            answer = request(
                server.url, "POST", path, json.dumps(body).encode(), **{"Content-Type": "application/json"}
            )
            assert (path, answer.status) == (path, status), answer
        for path in PATHS:
            assert server.get(path)[0] == 200
        assert psutil.Process(server.process.pid).memory_info().rss <= 150 * MEGABYTES
        assert server.stop() == 0
        assert (tmp_path / f"{server.process.pid}.txt").read_text() == "False"


def modules_after(code: str) -> set[str]:
    """What a process has imported after the code."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_what_takes_long_to_import_is_imported_after_the_core_has_started():
    modules = modules_after("import quire.cli.main, quire.server.serve")
    slow = {"torch", "numpy", "tokenizers", "fastapi", "pydantic", "uvicorn", "jinja2", "prometheus_client"}
    assert slow.isdisjoint(modules)
    assert "quire.scheduler.scheduler" not in modules


def test_a_command_imports_no_other_command():
    modules = modules_after("from quire.cli.main import build_parser; build_parser('generate')")
    assert "quire.cli.generate" in modules
    assert {"quire.cli.serve", "quire.cli.chat", "quire.cli.bench", "quire.cli.plan", "asyncio"}.isdisjoint(modules)


@pytest.mark.slow
def test_a_core_imports_nothing_of_the_text_side():
    modules = modules_after("import quire.engine.core_process, quire.engine.assemble")
    assert "torch" in modules
    assert {"tokenizers", "jinja2", "quire.engine.frontend", "quire.models.architectures.llama"}.isdisjoint(modules)


class Start:
    """`quire serve`, with a folder of its own for temporary files."""

    def __init__(self, folder: Path, *arguments: str, wrapper: Sequence[str] = ()) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "quire", "serve", "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"},
        )

    def processes(self) -> list[psutil.Process]:
        """Those that were started with this one's environment, and so all that it started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == str(self.folder):
                    found.append(process)
            except psutil.Error:  # it has ended, or is another user's
                continue
        return found

    def wait_for_the_core(self) -> None:
        """Its process watches its parent as soon as its heartbeat runs, beside the main thread and two of ZeroMQ."""
        eventually(lambda: any(process.num_threads() >= 4 for process in self.processes() if is_core(process)))

    def check_that_nothing_is_left(self) -> None:
        eventually(lambda: not self.processes())
        assert not list(self.folder.iterdir())


def is_core(process: psutil.Process) -> bool:
    return "spawn_main" in " ".join(process.cmdline())


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # with a short path: sockets are made in it
        yield Path(folder)


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat-template", "no/such/file"], "--chat-template"),
        pytest.param(["--tokenizer", "no/such/tokenizer"], "no/such/tokenizer", marks=pytest.mark.slow),
        pytest.param(["--max-model-len", "1M"], "--max-model-len", marks=pytest.mark.slow),
        pytest.param(["--middleware", "no.such.middleware"], "middleware", marks=pytest.mark.slow),
        pytest.param(["--logits-processors", "no.such:Processor"], "--logits-processors", marks=pytest.mark.slow),
    ],
)
def test_an_error_that_is_found_while_the_core_starts_leaves_no_process_and_no_folder(folder, arguments, message):
    start = Start(folder, *arguments)
    _, log = start.process.communicate(timeout=LONGEST)
    assert start.process.returncode == 1
    last = log.strip().splitlines()[-1]
    assert last.startswith("quire: error:")
    assert message in last
    assert "Traceback" not in log
    start.check_that_nothing_is_left()


@pytest.mark.parametrize(
    ("arguments", "module"),
    [pytest.param([], "uvicorn", marks=pytest.mark.slow), (["--api-server-count", "2"], "quire.server.processes")],
)
def test_a_signal_that_python_drops_while_a_module_is_imported_ends_the_server(
    folder, tmp_path, monkeypatch, arguments, module
):
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, sys, weakref

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            lost = Finder()
            watches.append(weakref.ref(lost, lambda _: [os.kill(os.getpid(), signal.SIGTERM) for _ in "x"]))

watches = []
sys.meta_path.insert(0, Finder())
""")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    start = Start(folder, *arguments)
    _, log = start.process.communicate(timeout=LONGEST)
    assert "Exception ignored" in log
    assert start.process.returncode == 128 + signal.SIGTERM
    start.check_that_nothing_is_left()


@pytest.mark.parametrize(
    "number", [*(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL]
)
def test_a_signal_while_the_core_starts_leaves_no_process_and_no_folder(folder, number):
    start = Start(folder)
    start.wait_for_the_core()
    start.process.send_signal(number)
    start.process.communicate(timeout=LONGEST)
    start.check_that_nothing_is_left()


@pytest.mark.skipif(not can_unshare(), reason="namespaces need root and unshare")
def test_the_first_process_of_a_container_can_be_ended_while_its_core_starts(folder):
    """Linux keeps signals from such a process for which it has no handler."""
    start = Start(folder, wrapper=["unshare", "--pid", "--fork"])
    start.wait_for_the_core()
    (first,) = psutil.Process(start.process.pid).children()
    first.terminate()
    start.process.communicate(timeout=LONGEST)
    assert start.process.returncode == 128 + signal.SIGTERM
    start.check_that_nothing_is_left()
