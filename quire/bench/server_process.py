"""A server in a separate process, on a free port of the loopback device."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

_READY = re.compile(r"Serving at (\S+): ")
_END_SECONDS = 20.0  # grace period for the server to exit


class ServerFailedError(RuntimeError):
    """The server did not start. The message has the last line of its log."""


class ServerProcess:
    """`quire serve` with options; a context manager. url: the server's URL, once `start` has returned."""

    def __init__(self, options: Mapping[str, Any], files: Path) -> None:
        """options: the engine's options, and "model". files: path without suffix for the options (.yaml) and the log
        (.log)."""
        settings = {name: value for name, value in options.items() if name != "hf_token"}  # secrets are not written
        file = files.with_suffix(".yaml")
        self._log = files.with_suffix(".log")
        file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")  # JSON is YAML
        fixed = ["--port", "0", "--disable-ui", "--wait-for-kernels"]
        command = [sys.executable, "-m", "quire", "serve", "--config", str(file), *fixed]
        token = options.get("hf_token")
        environment = {**os.environ, **({"HF_TOKEN": token} if isinstance(token, str) else {})}
        with self._log.open("wb") as log:
            # A separate process group: Ctrl-C reaches only the benchmark, which then ends the server.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def start(self, patience: float) -> str:
        """Wait until the server responds, at most `patience` seconds. Returns its URL. Raises ServerFailedError."""
        end = time.monotonic() + patience
        while True:
            log = self._log.read_text(encoding="utf-8", errors="replace")
            if ready := _READY.search(log):
                self.url = ready[1]
                return self.url
            if self._process.poll() is not None:
                last = log.strip().splitlines()[-1:] or [f"it ended with status {self._process.returncode}"]
                raise ServerFailedError(last[0])
            if time.monotonic() > end:
                raise ServerFailedError(f"it did not answer within {patience:g} s (--server-ready-timeout)")
            time.sleep(0.1)
