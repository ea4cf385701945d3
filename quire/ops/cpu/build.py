"""Compiles the C++ kernels of this folder on first use, into one shared library in the user's cache.

The library has a plain C interface and is loaded with ctypes: no torch headers, so that compiling takes seconds. It
has threads of its own (team.h): torch's OpenMP would have each operation wait for the slowest.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger("quire")

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-pthread", "-fPIC", "-Wno-psabi")
# What the kernels may use of a processor: all that it has, or no more than an older one (to see what that costs, and to
# test it); the compiler's flag, and features that the processor must have.
INSTRUCTION_SETS = {
    "native": ("-march=native", set[str]()),
    "avx512": ("-march=x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx2": ("-march=x86-64-v3", {"avx2", "fma", "bmi2", "f16c"}),
}
_ARGUMENTS = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


class Library:
    """The loaded kernels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaded = ctypes.CDLL(str(path))

    def function(self, name: str, arguments: str) -> Callable[..., None]:
        """A kernel; `arguments` has a letter for each: p(ointer), i(nt32), l (int64), f(loat)."""
        function: Any = self._loaded[name]
        function.argtypes = [_ARGUMENTS[letter] for letter in arguments]
        function.restype = None
        return function  # type: ignore[no-any-return]

    def address(self, name: str) -> int | None:
        """Of a function; None if there is none of that name."""
        try:
            return ctypes.cast(self._loaded[name], ctypes.c_void_p).value
        except AttributeError:
            return None


_chosen = ["native"]  # of the process: its kernels are one library


def choose_instruction_set(name: str) -> None:
    """For all kernels of this process from now on. Raises ValueError if the processor lacks it."""
    if lacking := INSTRUCTION_SETS[name][1] - set(_cpu_features().split()):
        raise ValueError(f"cpu_isa={name!r}: this processor lacks {', '.join(sorted(lacking))}")
    if name != _chosen[0]:
        _chosen[0] = name
        library.cache_clear()
        _kernel.cache_clear()


@cache
def library() -> Library | None:
    """The kernels, compiled if need be; None where that is not possible, of which one warning tells."""
    if sys.platform != "linux":
        return None
    from platformdirs import user_cache_path  # which an engine on a GPU does without

    try:
        return load(user_cache_path("quire") / "kernels", [*FLAGS, INSTRUCTION_SETS[_chosen[0]][0]])
    except (BuildError, OSError) as error:
        logger.warning("The CPU kernels cannot be compiled; slower torch operations serve instead. %s", error)
        return None


class _Recorder(threading.local):
    """Who is to see a thread's calls of kernels: given a kernel's name, arguments and itself, returns what to call."""

    record: Callable[[str, str, Callable[..., None]], Callable[..., None]] | None = None


recorder = _Recorder()


def kernel(name: str, arguments: str) -> Callable[..., None]:
    """A kernel of `library()`, which must not be None: for implementations that were chosen because it is not."""
    function, record = _kernel(name, arguments), recorder.record
    return function if record is None else record(name, arguments, function)


@cache
def _kernel(name: str, arguments: str) -> Callable[..., None]:
    loaded = library()
    assert loaded is not None
    return loaded.function(name, arguments)


def recordable(name: str) -> int | None:
    """The address of the form of a kernel that replay.cpp calls, None if it has none."""
    loaded = library()
    return None if loaded is None else loaded.address(f"{name}_recorded")


def load(folder: Path, flags: Sequence[str] = (*FLAGS, "-march=native")) -> Library:
    """The library from `folder`, compiled into it if it is not there or is damaged.

    Raises BuildError if there is no compiler or it fails, OSError if the folder cannot be written.
    """
    compiler = _find_compiler()
    path = folder / f"{_fingerprint(compiler, flags)}.so"
    if (loaded := _open_sound(path)) is not None:
        return loaded
    import fcntl  # not everywhere; `library()` gets here on Linux only

    folder.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:  # one process compiles, others wait for what it makes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (loaded := _open_sound(path)) is None:
            _compile(compiler, flags, path)
            loaded = Library(path)
    return loaded


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        if (found := shutil.which(name)) is not None:
            return found
    raise BuildError(f"There is no compiler {wanted!r} ($CXX)." if wanted else "Installing g++ makes them available.")


def _fingerprint(compiler: str, flags: Sequence[str]) -> str:
    """Changes with everything that the machine code depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    facts = [compiler, version, *flags, _cpu_features()]
    digest = hashlib.sha256("\0".join(facts).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, flags: Sequence[str], path: Path) -> None:
    started = time.monotonic()
    print("Compiling CPU kernels (first use) ... ", end="", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [f"{temporary}/{source.stem}.o" for source in sources]
        _run([[compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)])
        linked = Path(temporary, "linked.so")
        _run([[compiler, "-shared", "-pthread", *objects, "-o", str(linked)]])
        # A digest at the end, which the loader does not mind: a file that lost a part on a full or crashed disk is
        # recognized, where loading it could kill the process.
        code = linked.read_bytes()
        linked.write_bytes(code + hashlib.sha256(code).digest())
        os.replace(linked, path)
    print(f"{time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def _run(commands: list[list[str]]) -> None:
    """Run the commands side by side; raise BuildError with the first lines of what the first failing one says."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    said = [process.communicate()[0] for process in running]
    for command, process, text in zip(commands, running, said, strict=True):
        if process.returncode != 0:
            print("failed", file=sys.stderr, flush=True)
            raise BuildError(f"{command[0]} says:\n" + "\n".join(text.splitlines()[:8]))


def _open_sound(path: Path) -> Library | None:
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[:-32]).digest() == content[-32:]:
            return Library(path)
    except OSError:  # not there, or the loader refuses it
        pass
    return None
