"""Watching the engines of servers that tests start as commands, see support/combinations.py."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "QUIRE_TESTS_FEATURES"  # names the folder into which processes write what their engines have


def python_path(*folders: Path) -> str:
    """The PYTHONPATH of a command: these folders, and that of sitecustomize.py if engines are watched."""
    watching = [Path(__file__).parent] if FOLDER_VARIABLE in os.environ else []
    return os.pathsep.join(map(str, [*folders, *watching]))
