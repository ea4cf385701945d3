"""A PostgreSQL server of our own, from Debian's programs: on the loopback device, with data in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# PostgreSQL refuses to run as root. Options of subprocess that run it as somebody else.
_NOBODY = {"user": pwd.getpwnam("nobody").pw_uid, "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}
_USER: dict[str, Any] = _NOBODY if os.geteuid() == 0 else {}


def programs() -> Path | None:
    """The folder of PostgreSQL's programs, which Debian keeps out of PATH. None if they cannot be run."""
    found = shutil.which("initdb")
    folder = Path(found).parent if found else max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
    try:
        if folder is not None:
            subprocess.run([folder / "initdb", "--version"], check=True, capture_output=True, cwd="/", **_USER)
    except (OSError, subprocess.CalledProcessError):
        return None
    return folder


class Postgres:
    """url: of a database for its only user. stop and start keep the data."""

    def __init__(self, folder: Path, port: int) -> None:
        self.data, self.port = folder / "data", port
        self.url = f"postgresql://quire@127.0.0.1:{port}/postgres"
        self._programs = programs()
        if _USER:
            os.chown(folder, _USER["user"], _USER["group"])
        self._run("initdb", "-D", str(self.data), "-U", "quire", "--auth", "trust", "--no-sync")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", timeout=600, **_USER)

    def start(self) -> None:
        options = f"-c listen_addresses=127.0.0.1 -c port={self.port} -c unix_socket_directories= -c fsync=off"
        log = str(self.data.parent / "log")
        self._run("pg_ctl", "start", "--wait", "-D", str(self.data), "-l", log, "-o", options)

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "--wait", "-D", str(self.data), "-m", "immediate")


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Skips the test if PostgreSQL or its driver is not installed."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    if programs() is None:
        pytest.skip("PostgreSQL's programs are not installed, or cannot be run")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="quire-postgres-"))
    try:
        server = Postgres(folder, port)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
