"""Prepares Quire's own processes for the import of torch, which takes more than half of their start."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from threading import Thread

from quire.platform import lean_torch
from quire.platform.garbage import collect_rarely, without_collections

_IN_C = (  # or import such modules
    "array",
    "binascii",
    "contextvars",
    "hashlib",
    "heapq",
    "mmap",
    "msgspec",
    "pickle",
    "queue",
    "resource",
    "select",
    "ssl",
    "subprocess",
    "tempfile",
)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Within this context, torch and the modules that use it are imported more quickly.

    Do work that does not need torch first: a thread loads torch's library in parallel.
    """
    collect_rarely()
    lean_torch.prepare()
    load_library()
    with without_collections():
        yield


@cache
def load_library() -> None:
    """Load libtorch_cpu on a thread. This takes 0.15 to 0.25 s, which would otherwise be part of the import. Call it as
    soon as it is certain that torch will be imported.

    Python holds its lock while an import loads a library, but releases it while ctypes calls a function such as dlopen.
    If the library cannot be loaded, dlopen returns 0, and the import reports the reason. The system loads one library
    at a time, so modules in C that are imported before torch are imported here.
    """
    spec = PathFinder.find_spec("torch")
    if "torch" in sys.modules or sys.platform != "linux" or spec is None or spec.origin is None:
        return
    for module in _IN_C:
        import_module(module)
    library = Path(spec.origin).with_name("lib") / "libtorch_cpu.so"
    if library.is_file():
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.restype = ctypes.c_void_p
        Thread(target=dlopen, args=(os.fsencode(library), os.RTLD_NOW), name="load-torch").start()
