"""Pretends that there are two GPUs, and writes CUDA_VISIBLE_DEVICES to the file $CUDA_INIT_LOG whenever CUDA would be
initialized in a process. Python imports this file at its start if its folder is in PYTHONPATH.

As with a GPU and NVIDIA's management library, torch.cuda.device_count does not initialize CUDA, but is_available does.
The engine then runs on the CPU.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class TorchFinder:
    """Finds torch, and replaces two functions once it is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(TorchFinder)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module.cuda.is_available = _initialize
            module.cuda.device_count = _count

        loader.exec_module = exec_module
        return spec


_is_initialized = False


def _initialize() -> bool:
    global _is_initialized
    if not _is_initialized:
        _is_initialized = True
        with open(os.environ["CUDA_INIT_LOG"], "a", encoding="ascii") as log:
            log.write(os.environ.get("CUDA_VISIBLE_DEVICES", "every") + "\n")
    return False


def _count() -> int:
    return len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(","))


sys.meta_path.insert(0, TorchFinder)  # type: ignore[arg-type]
