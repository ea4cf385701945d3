"""A stand-in for the Hugging Face hub: the endpoints that a download uses, over a folder of repositories."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_environment(address: str, home: Path) -> dict[str, str]:
    """The environment of a process that uses the hub at this address, and keeps its cache in `home`/hub."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    return {**environment, "HF_ENDPOINT": address, "HF_HOME": str(home)}


class Hub:
    """Serves `folder`/owner/name/*, as a context manager. tokens: those that give access to gated/... repositories.

    requests: (method, path) of every request. sent: bytes of each path in answers to requests for a part. revisions:
    names that exist besides main and the commit. licence: what the models' cards say. stalls: ends of the names of
    files of which only one half is sent; `stalled` is set then.
    """

    def __init__(
        self, folder: Path, tokens: tuple[str, ...] = (), revisions: tuple[str, ...] = ("main", COMMIT)
    ) -> None:
        self.folder, self.tokens, self.revisions = folder, tokens, revisions
        self.requests: list[tuple[str, str]] = []
        self.sent: dict[str, int] = {}
        self.licence = "apache-2.0"
        self.stalls: tuple[str, ...] = ()
        self.stalled, self.closing = threading.Event(), threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

            def _answer(self, with_body: bool) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.command, path))
                status, headers, body = hub.answer(path, self.headers.get("Authorization", ""))
                if status == 200 and (wanted := self.headers.get("Range")):
                    start, end = wanted.removeprefix("bytes=").split("-")
                    part = body[int(start) : int(end) + 1 if end else None]
                    headers["Content-Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(body)}"
                    hub.sent[path] = hub.sent.get(path, 0) + len(part)
                    status, body = 206, part
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body and path.endswith(hub.stalls):
                    self.wfile.write(body[: len(body) // 2])
                    hub.stalled.set()
                    hub.closing.wait()
                elif with_body:
                    self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, authorization: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
        else:
            name, rest = "/".join(parts[:2]), parts[2:]
        directory = self.folder / name
        if len(parts) < 2 or not directory.is_dir():
            return self._error(401, "RepoNotFound", "Repository not found")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in self.revisions:
            return self._error(404, "RevisionNotFound", "Invalid rev id")
        files = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
        if parts[0] == "api" and rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": f, "size": (directory / f).stat().st_size, "oid": "0" * 40} for f in files]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if parts[0] == "api":
            siblings = [
                {"rfilename": f, "size": (directory / f).stat().st_size, "blobId": self._content(directory / f)}
                for f in files
            ]
            info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            info |= {"cardData": {"license": self.licence}}
            return 200, {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}, json.dumps(info).encode()
        if name.startswith("gated/") and authorization not in [f"Bearer {token}" for token in self.tokens]:
            return self._error(401, "GatedRepo", "Access to this model is restricted")  # what files there are is public
        file = "/".join(rest[2:])
        if rest[:1] != ["resolve"] or file not in files:
            return self._error(404, "EntryNotFound", "Entry not found")
        body = (directory / file).read_bytes()
        headers = {"ETag": f'"{self._content(directory / file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return 200, headers, body

    @staticmethod
    def _content(file: Path) -> str:
        """The name of a file's content."""
        return hashlib.sha1(file.read_bytes()).hexdigest()

    @staticmethod
    def _error(status: int, code: str, message: str) -> tuple[int, dict[str, str], bytes]:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
        return status, headers, json.dumps({"error": message}).encode()

    def fetched(self) -> set[str]:
        """The files whose contents were requested."""
        paths = [path for method, path in self.requests if method == "GET" and "/resolve/" in path]
        return {path.split(f"/resolve/{COMMIT}/")[-1] for path in paths}

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Machine:
    """The stand-in, and a home folder for the commands' processes."""

    hub: Hub
    home: Path

    @property
    def cache(self) -> Path:
        return self.home / "hub"

    def run(self, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "quire", *line.split()],
            capture_output=True,
            text=True,
            timeout=600,
            env={**hub_environment(self.hub.address, self.home), **environment},
            stdin=subprocess.DEVNULL,
        )

    def says(self, line: str, **environment: str) -> str:
        """The output of a command that succeeds and writes nothing else."""
        done = self.run(line, **environment)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", done.stderr
        return done.stdout

    def fails(self, line: str, **environment: str) -> str:
        """The error of a command, which is one line."""
        done = self.run(line, **environment)
        assert done.returncode == 1
        assert done.stderr.startswith("quire: error: ")
        assert done.stderr.count("\n") == 1
        return done.stderr
