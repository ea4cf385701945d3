"""Environments of their own for packages of clients, so that their dependencies never meet Quire's."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"
ENVIRONMENTS = CI / "environments"
CLIENTS = Path(__file__).parents[1] / "clients"
REQUIREMENTS = CLIENTS / "requirements.txt"
VARIABLE = "QUIRE_TEST_CLIENTS_PYTHON"


def clients_python() -> Path:
    """The Python of the environment that has all packages of clients: the one that VARIABLE names, or that of .ci/run.

    Skips the test if they cannot be installed.
    """
    if given := os.environ.get(VARIABLE):
        return Path(given)
    return _installed(CI / "clients-venv", "--requirement", str(REQUIREMENTS))


def clients_node(script: Path) -> list[str | Path]:
    """The command that runs a script for Node, beside the packages of tests/clients/package.json.

    Skips the test if there is no Node, or if the packages cannot be installed.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    directory = CI / "clients-node"
    complete, wanted = directory / "complete", (CLIENTS / "package.json").read_text()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be installing the same
            if not complete.is_file() or complete.read_text() != wanted:
                shutil.copy(CLIENTS / "package.json", directory)
                _run(npm, "install", "--no-audit", "--no-fund", "--prefix", directory)
                complete.write_text(wanted)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"packages for Node cannot be installed: {(getattr(error, 'stderr', None) or str(error))[-200:]}")
    return [node, shutil.copy(script, directory)]  # Node looks for packages beside the script


def client_python(*packages: str) -> Path:
    """The Python of an environment with these packages, such as "mkdocs>=1,<2". It is installed once, and then kept.

    Skips the test if the packages cannot be installed.
    """
    name = hashlib.sha256(" ".join([sys.version, *sorted(packages)]).encode()).hexdigest()[:16]
    return _installed(ENVIRONMENTS / name, *packages)


def _installed(directory: Path, *arguments: str) -> Path:
    python, complete = directory / "bin" / "python", directory / "complete"
    if complete.is_file():
        return python
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be installing the same
            if not complete.is_file():
                _run(sys.executable, "-m", "venv", "--clear", directory)
                _run(*pip, "--upgrade", "pip")  # an older one needs minutes to choose the versions
                _run(*pip, *arguments)
                complete.touch()
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        pytest.skip(f"{', '.join(arguments)} cannot be installed: {' '.join(reason)}")
    return python


def run_client(python: Path, script: str, *arguments: str, timeout: float = 600) -> str:
    """What a script prints. script: its source. Fails with the script's traceback if it raises."""
    process = subprocess.run(
        [python, "-c", script, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
