"""The real server in a process of its own."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from support.server import Client
from support.waiting import LONGEST, eventually
from support.watched_commands import python_path


class Server:
    """`quire serve` on a free port of the loopback device; a context manager.

    url: of the server, as the line says that tells when it is ready. log: its output so far.
    """

    command, ready_line = "serve", r"Serving at (\S+): "

    def __init__(
        self,
        *arguments: str,
        start_timeout: float = LONGEST,
        files: tuple[int, int] | None = None,
        wrapper: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """files: soft and hard limit of open files. wrapper: a prefix of the command."""
        tests = Path(__file__).parents[1]
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "quire", self.command, "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path(tests), "OMP_NUM_THREADS": "1", **environment},
            preexec_fn=None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files),
        )
        self._lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._await_start(start_timeout)

    def _await_start(self, seconds: float) -> None:
        if not self._ready.wait(seconds) or not self.url:
            self.process.kill()
            raise AssertionError(f"the server did not start:\n{self.log}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            found = re.search(self.ready_line, line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()  # it has ended

    @property
    def log(self) -> str:
        return "".join(self._lines)

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, port = self.url.split("//")[1].rsplit(":", 1)
        return host, int(port)

    @property
    def client(self) -> Client:
        return Client(self.host_and_port[1])

    @property
    def core(self) -> psutil.Process:
        """The process of the engine core: the newest child that is not a helper of multiprocessing."""
        children = psutil.Process(self.process.pid).children()
        cores = [p for p in children if "resource_tracker" not in " ".join(p.cmdline())]
        return max(cores, key=lambda p: p.create_time())

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=LONGEST) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        found = re.search(rf"^quire:{name}{{[^}}]*}} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        assert found, name
        return float(found[1])

    def wait_until_idle(self) -> None:
        """Wait until no sequence runs or waits and no block is held."""
        names = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
        eventually(lambda: not any(map(self.metric, names)), lambda: {name: self.metric(name) for name in names})

    def stop(self, seconds: float = LONGEST) -> int:
        """Send SIGTERM and wait. Returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(60)
        _, alive = psutil.wait_procs(family, timeout=60)
        for process in alive:
            process.kill()
        assert not alive, f"processes were left behind: {alive}"
