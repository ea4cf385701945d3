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
REQUIREMENTS = {"clients": CLIENTS / "requirements.txt", "frameworks": CLIENTS / "requirements-frameworks.txt"}


def clients_python(name: str = "clients") -> Path:
    """The Python of an environment of REQUIREMENTS: .ci/NAME-venv, or what QUIRE_TEST_CLIENTS_PYTHON and
    QUIRE_TEST_FRAMEWORKS_PYTHON name.

    Skips the test if the packages cannot be installed.
    """
    if given := os.environ.get(f"QUIRE_TEST_{name.upper()}_PYTHON"):
        return Path(given)
    requirements = REQUIREMENTS[name]
    return _installed(CI / f"{name}-venv", "--requirement", str(requirements), wanted=requirements.read_text())


def clients_node(script: Path) -> list[str | Path]:
    """The command that runs a script for Node, beside a copy of tests/clients and the packages of its package.json.

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
            if not _contains(complete, wanted):
                shutil.copy(CLIENTS / "package.json", directory)
                _run(npm, "install", "--no-audit", "--no-fund", "--prefix", directory)
                complete.write_text(wanted)
            for module in CLIENTS.glob("*.mjs"):  # Node looks for packages beside the script
                copy = directory / module.name
                if not _contains(copy, module.read_text()):
                    shutil.copy(module, copy)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"packages for Node cannot be installed: {(getattr(error, 'stderr', None) or str(error))[-200:]}")
    return [node, directory / script.name]


def client_python(*packages: str) -> Path:
    """The Python of an environment with these packages, such as "mkdocs>=1,<2". It is installed once, and then kept.

    Skips the test if the packages cannot be installed.
    """
    name = hashlib.sha256(" ".join([sys.version, *sorted(packages)]).encode()).hexdigest()[:16]
    return _installed(ENVIRONMENTS / name, *packages)


def _installed(directory: Path, *arguments: str, wanted: str = "") -> Path:
    """wanted: what `complete` contains if the environment has these packages."""
    python, complete = directory / "bin" / "python", directory / "complete"
    if _contains(complete, wanted):
        return python
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be installing the same
            if not _contains(complete, wanted):
                _run(sys.executable, "-m", "venv", "--clear", directory)
                _run(*pip, "--upgrade", "pip")  # an older one needs minutes to choose the versions
                _run(*pip, *arguments)
                complete.write_text(wanted)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        pytest.skip(f"{', '.join(arguments)} cannot be installed: {' '.join(reason)}")
    return python


def _contains(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text() == text


def run_client(python: Path, script: str, *arguments: str, timeout: float = 600) -> str:
    """What a script prints. script: its source. Fails with the script's traceback if it raises."""
    process = subprocess.run(
        [python, "-c", script, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
