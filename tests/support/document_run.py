"""Runs the commands and Python examples of a document, in a folder of its own, as a reader would one after the other.

Where readers have models, machines and ports, there are stand-ins: the bundled model, this machine and free ports. A
server runs until the document ends, or until another one takes its port.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from quire.checkpoints.hub import bundled_model, resolve
from support.client_environment import clients_python
from support.documents import ROOT, Block, Command, blocks, commands, name_of, write_files
from support.gguf_files import write_gguf
from support.hub import Hub, hub_environment

# On the stand-in of the hub, all are the bundled model.
HUGGING_FACE_IDS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct")
GGUF_IDS = ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M",)
CLIENTS = ("anthropic", "ollama")  # packages that have an environment of their own
SECONDS = 1800  # for a command, or the start of a server, beside other work
NAMES = """\
from quire import LLM, AsyncLLM, SamplingParams
model, prompts = None, ["Once upon a time"]
"""  # what examples use that begin in the middle


class DocumentRun:
    """extra: options that are added to every server of the document. more: what is added to single commands."""

    def __init__(self, path: Path, folder: Path, extra: str = "", more: dict[str, str] | None = None) -> None:
        self.path, self.folder, self.extra, self.more = path, folder, extra, more or {}
        self._ports: dict[tuple[str, str], int] = {}  # by the host and the port of the document
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        for name in HUGGING_FACE_IDS:
            shutil.copytree(bundled_model(), folder / "hub" / name)
        for name in GGUF_IDS:
            repository, _, kind = name.partition(":")
            (folder / "hub" / repository).mkdir(parents=True)
            write_gguf(bundled_model(), folder / "hub" / repository / f"model-{kind}.gguf", "Q8_0")
        for name in ("sql", "support"):
            shutil.copytree(resolve("quire-demo/rhyme"), folder / "work" / "adapters" / name)
        shutil.copytree(resolve("quire-demo/rhyme"), folder / "work" / "sql-v2")
        shutil.copyfile(bundled_model() / "model.safetensors", folder / "work" / "model.safetensors")
        (folder / "work" / "tools").symlink_to(ROOT / "tools")
        write_files(folder / "work")
        self._hub = Hub(folder / "hub")

    def __enter__(self) -> Self:
        self._hub.__enter__()
        programs = self.folder / "bin"
        programs.mkdir()
        for name, arguments in (("quire", "-m quire"), ("python", "")):
            (programs / name).write_text(
                f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{ROOT}" exec {sys.executable} {arguments} "$@"\n'
            )
            (programs / name).chmod(0o755)
        environment = hub_environment(self._hub.address, self.folder / "home")
        self._environment = {**environment, "PATH": f"{programs}:{os.environ['PATH']}", "KEY": "secret"}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for port in list(self._servers):
            self._stop(port)
        self._hub.__exit__(kind, error, trace)

    # ---- blocks and commands

    def run(self, block: Block, without: set[str]) -> None:
        """without: commands that are left out."""
        if block.language == "python":
            self._python(block)
        elif block.language == "bash":
            for command in commands(self.path):
                if command.block == block and command.text not in without:
                    self._command(command)

    def _command(self, command: Command) -> None:
        text = self._translate(command.text)
        if re.match(r"(\w+=\S+ )*quire (serve|route)\b", text):
            self._serve(text, command.text)
            return
        self._start_what_is_asked(text)
        text += " " + self.more.get(command.text, "")
        self._check(str(command), ["bash", "-euc", text], b"")

    def _python(self, block: Block) -> None:
        first = block.text.splitlines()[0]
        if found := re.fullmatch(r"# (\w+\.py)", first):
            (self.folder / "work" / found[1]).write_text(block.text)
            return
        text = self._translate(block.text)
        self._start_what_is_asked(text)
        foreign = any(f"from {name} import" in text for name in CLIENTS)
        python = str(clients_python()) if foreign else sys.executable
        names = "" if "import" in text else NAMES
        self._check(str(block), [python, "-c", names + text], b"")

    def _check(self, name: str, command: list[str], stdin: bytes) -> None:
        done = subprocess.run(
            command, cwd=self.folder / "work", env=self._environment, input=stdin, capture_output=True, timeout=SECONDS
        )
        if done.returncode:
            raise AssertionError(
                f"{name}\nended with {done.returncode}:\n{(done.stdout + done.stderr).decode()[-3000:]}"
            )

    # ---- stand-ins

    def _translate(self, text: str) -> str:
        text = re.sub(r"path/to/(checkpoint|model)|\bMODEL\b", str(bundled_model()), text)
        text = re.sub(r"--kv-offloading-size \d+", "--kv-offloading-size 0.1", text)  # GiB of memory
        text = re.sub(
            r'"kv_ip": "([\d.]+)", "kv_port": (\d+)',
            lambda found: f'"kv_ip": "{found[1]}", "kv_port": {self._port(found[1], found[2])}',
            text,
        )
        text = re.sub(
            r"(localhost|127\.0\.0\.1|10\.0\.0\.\d+|\*):(\d{4,5})",
            lambda found: f"127.0.0.1:{self._port(found[1], found[2])}",
            text,
        )
        host = found[1] if (found := re.search(r"--host (\S+)", text)) else "127.0.0.1"
        text = re.sub(r"--port (\d+)", lambda found: f"--port {self._port(host, found[1])}", text)
        if re.match(r"(\w+=\S+ )*quire (serve|route)\b", text) and "--port" not in text:
            text += f" --port {self._port(host, '8000')}"
        return re.sub(r"\b10\.0\.0\.\d+", "127.0.0.1", text)

    def _port(self, host: str, number: str) -> int:
        place = ("127.0.0.1" if host in ("localhost", "*") else host, number)
        if place not in self._ports:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self._ports[place] = free.getsockname()[1]
        return self._ports[place]

    # ---- servers

    def _start_what_is_asked(self, text: str) -> None:
        """The server at port 8000 that a client needs, if no command has started one."""
        port = self._port("127.0.0.1", "8000")
        if f":{port}" in text and port not in self._servers:
            self._serve(f"quire serve --port {port}", "the server of the document")

    def _serve(self, text: str, name: str) -> None:
        found = re.search(r"--port (\d+)", text)
        assert found is not None
        port = int(found[1])
        self._stop(port)
        if "quire serve" in text:
            text += f" --max-num-seqs 8 --kv-cache-memory-bytes 64M {self.extra} {self.more.get(name, '')}"
        log = (self.folder / f"{port}.log").open("wb")
        self._servers[port] = server = subprocess.Popen(
            ["bash", "-c", f"exec env {text}"], cwd=self.folder / "work", env=self._environment, stdout=log, stderr=log
        )
        deadline = time.monotonic() + SECONDS
        while not self._is_ready(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{name}: it did not start:\n{Path(log.name).read_text()[-3000:]}")
            time.sleep(0.2)

    def _is_ready(self, port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=SECONDS):
                return True
        except urllib.error.HTTPError as error:
            return error.code == 401
        except OSError:
            return False

    def _stop(self, port: int) -> None:
        server = self._servers.pop(port, None)
        if server is not None:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(300)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def run_document(
    path: Path, folder: Path, without: set[str], extra: str = "", more: dict[str, str] | None = None
) -> None:
    with DocumentRun(path, folder, extra, more) as running:
        for block in blocks(path):
            if str(block) not in without and name_of(path) not in without:
                running.run(block, without)
