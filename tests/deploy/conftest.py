"""The wheel and the source distribution, built once.

QUIRE_WHEEL names a wheel of the same sources, which spares the four minutes to build it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.commands import run

BUILD = Path(__file__).parents[2] / "tools/build_wheel.py"


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both."""
    if given := os.environ.get("QUIRE_WHEEL"):
        return Path(given).parent
    for package in ("build", "ziglang", "auditwheel"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, str(BUILD), "--output", str(folder)])
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found
