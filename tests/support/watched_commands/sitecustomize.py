"""Imported by Python at its start if this folder is in PYTHONPATH: watches the engines of the process, if it has any.

A process that serves is one that imports the frontend. Nothing is imported before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


class Watch(MetaPathFinder):
    """Finds only the frontend, and only once."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "quire.engine.frontend":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            from support.watched_features import watch_into

            watch_into(Path(os.environ["QUIRE_TESTS_FEATURES"]))

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


if "QUIRE_TESTS_FEATURES" in os.environ:
    sys.meta_path.insert(0, Watch())
