"""The first run on a machine: no kernels are compiled, and the compiler is missing, fails, or is slow."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from quire.ops.cpu.build import find_compiler
from support.server_process import Server
from support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.plain("drafts are made for one kind of kernels, so such an engine waits"),
    pytest.mark.skipif(sys.platform != "linux" or find_compiler() is None, reason="no compiler here"),
]
ARGUMENTS = ["--temperature", "0", "--max-tokens", "12", "--dtype", "float32", "Once upon a time"]


class HeldCompiler:
    """A compiler that does nothing until it is let go, and has written the ids of its processes."""

    def __init__(self, folder: Path) -> None:
        self._gate, self._ids, script = folder / "held", folder / "ids", folder / "compiler"
        self._gate.touch()
        waiting = f"while [ -e {self._gate} ]; do sleep 0.1; done"
        real = shlex.join(find_compiler() or [])
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] || {{ echo $PPID >>{self._ids}; {waiting}; }}\nexec {real} "$@"\n'
        )
        script.chmod(0o755)
        self.path = str(script)

    def let_go(self) -> None:
        self._gate.unlink(missing_ok=True)

    def end(self) -> None:
        """End the process that compiles, which would go on for minutes."""
        for process in set(self._ids.read_text().split()) if self._ids.exists() else ():
            try:
                os.killpg(int(process), signal.SIGTERM)  # it is the first of a group of its own
            except ProcessLookupError:
                continue
        self.let_go()


@pytest.fixture
def held(tmp_path):
    compiler = HeldCompiler(tmp_path)
    yield compiler
    compiler.end()


def generate(cache: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", "generate", *options, *ARGUMENTS],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
    )


def test_generate_answers_while_the_compiler_is_missing_or_waits_or_fails(tmp_path, held):
    expected = generate(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")), "--wait-for-kernels").stdout
    missing = generate(tmp_path / "missing", CXX="/nonexistent")
    assert missing.stdout == expected
    assert "No C++ compiler was found" in missing.stderr
    waiting = generate(tmp_path / "waiting", CXX=held.path)
    assert waiting.stdout == expected
    assert "compiled in the background" in waiting.stderr
    failing = generate(tmp_path / "failing", CXX="/bin/false")
    assert failing.stdout == expected
    read_only = tmp_path / "read-only"
    read_only.touch()  # in place of a folder; root may write everywhere
    assert generate(read_only, CXX="/bin/false").stdout == expected


def test_a_server_answers_at_once_and_its_health_tells_when_the_kernels_are_compiled(tmp_path, held):
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": held.path}
    with Server("--dtype", "float32", **environment) as server:
        body = {"model": "quire-demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
        assert json.loads(server.get("/health")[1]) == {"reference_kernels": True}
        first = server.client.post("/v1/completions", body).json["choices"][0]["text"]
        held.let_go()
        seeded = server.client.post("/v1/completions", {**body, "seed": 3}).json["choices"][0]["text"]
        eventually(lambda: json.loads(server.get("/health")[1]) == {"reference_kernels": False})
        assert seeded == first
        assert "steps run the CPU kernels" in server.log
        held.end()
        for process in psutil.Process(server.process.pid).children(recursive=True):
            if any("compiling.py" in argument for argument in process.cmdline()):
                process.kill()  # it outlives the server
