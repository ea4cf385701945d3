"""Compiles the C++ kernels of this folder on first use, into one shared library in the user's cache folder. A wheel
brings them compiled.

The library has a plain C interface and is loaded with ctypes. It uses no torch headers, so compiling takes seconds. It
has its own threads (team.h), since with torch's OpenMP each operation would wait for the slowest thread.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quire.messages.errors import error_text
from quire.ops.cpu.processor import INSTRUCTION_SETS, USED_FEATURES, cpu_features
from quire.system import limits
from quire.system.folders import cache_folder, scratch_folder

logger = logging.getLogger("quire")

SOURCES = Path(__file__).parent
PACKAGED = SOURCES / "compiled"  # the libraries of a wheel, one for each instruction set: tools/build_wheel.py
# Without errno, a square root is one instruction. Why nothing may be contracted: see fma in lanes.h.
FLAGS = ("-O3", "-std=c++17", "-pthread", "-fPIC", "-Wno-psabi", "-fno-math-errno", "-ffp-contract=off")
_DISK = 1 << 25  # bytes of disk that compiling needs
_MEMORY = 400 << 20  # bytes that the compiler needs for the largest source
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of types of tensors: with_type in vector.h
_ARGUMENTS = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}


class BuildError(RuntimeError):
    """The kernels cannot be compiled on this machine. The message says why, and what to do."""


class Library:
    """The loaded kernels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaded = ctypes.CDLL(str(path))

    def function(self, name: str, arguments: str) -> Callable[..., None]:
        """A kernel. `arguments` has a letter for each argument: p(ointer), i(nt32), l (int64), f(loat)."""
        function: Any = self._loaded[name]
        function.argtypes = [_ARGUMENTS[letter] for letter in arguments]
        function.restype = None
        return function  # type: ignore[no-any-return]

    def address(self, name: str) -> int | None:
        """The address of a function, None if the library has none of that name."""
        try:
            return ctypes.cast(self._loaded[name], ctypes.c_void_p).value
        except AttributeError:
            return None


_chosen = ["native"]  # one choice for the process, whose kernels are one library


def choose_instruction_set(name: str) -> None:
    """Choose the instruction set of all kernels of this process. Raises ValueError if the processor lacks it."""
    if lacking := INSTRUCTION_SETS[name][1] - set(cpu_features().split()):
        raise ValueError(f"cpu_isa={name!r}: this processor lacks {', '.join(sorted(lacking))}")
    if name != _chosen[0]:
        _chosen[0] = name
        library.cache_clear()
        _kernel.cache_clear()


@cache
def library() -> Library | None:
    """The kernels, compiled if necessary. If that is not possible, None, after one warning."""
    if sys.platform not in ("linux", "darwin"):
        return None
    flags, folder = _flags(_chosen[0]), cache_folder()
    try:
        if (found := find_library()) is not None:
            return found
        if folder is None:
            return _load_once(flags, "this user has no home folder")
        try:
            return load(folder / "kernels", flags)
        except OSError as error:
            return _load_once(flags, error_text(error))
    except (BuildError, OSError) as error:
        logger.warning(
            "There are no compiled CPU kernels: steps run PyTorch's operations, which take five times as long or more. "
            "%s",
            error_text(error),
        )
        return None


def find_library() -> Library | None:
    """The kernels if they need not be compiled, else None."""
    if sys.platform not in ("linux", "darwin"):
        return None
    folder, name = cache_folder(), _chosen[0]
    packaged = _best(PACKAGED) if name == "native" else _find(PACKAGED, _flags(name), "*")
    if packaged is not None or folder is None:
        return packaged
    shipped = _best(folder / "kernels", is_compiler_better=True) if name == "native" else None
    return shipped or _find(folder / "kernels", _flags(name))


def instruction_set_of(library: Library) -> str:
    """The name of the instruction set for which the library was compiled."""
    return next(name for name in INSTRUCTION_SETS if library.path.name.startswith(_fingerprint(_flags(name))))


def _flags(name: str) -> list[str]:
    return [*FLAGS, *INSTRUCTION_SETS[name][0].split()]


def _best(folder: Path, is_compiler_better: bool = False) -> Library | None:
    """The best library for a named instruction set in `folder` that this processor can run.

    is_compiler_better: if there is a compiler, only one with all of the processor's instructions that the kernels use.
    """
    features = set(cpu_features().split())
    for name, (_, needed) in INSTRUCTION_SETS.items():
        serves = name != "native" and needed <= features
        if is_compiler_better:
            serves = serves and (features & USED_FEATURES <= needed or find_compiler() is None)
        if serves and (found := _find(folder, _flags(name), "*")) is not None:
            return found
    return None


def compile_for(name: str, folder: Path) -> Path:
    """The library for an instruction set, which this processor need not have, compiled into `folder` if it is missing.

    Raises BuildError if there is no compiler or it fails, OSError if the folder is not writable or not trustworthy.
    """
    compiler, flags = find_compiler(), _flags(name)
    if compiler is None:
        raise BuildError(_MISSING_COMPILER)
    path = folder / f"{_fingerprint(flags)}-{_version(compiler)}.so"
    _compile_once(compiler, flags, path, _is_sound)  # loading it might run instructions that this processor lacks
    return path


def _load_once(flags: Sequence[str], reason: str) -> Library:
    """The library for this process alone, from a folder that no other user can enter. reason: why it is not cached.

    Raises BuildError and OSError like `load`.
    """
    with scratch_folder("quire-kernels-") as folder:
        loaded = load(folder, flags)
    logger.warning(
        "The compiled CPU kernels cannot be kept, so every start compiles them again: %s. Set XDG_CACHE_HOME to a "
        "folder that this user can write.",
        reason,
    )
    return loaded


class _Recorder(threading.local):
    """A thread's hook for kernel calls: from a kernel's name, arguments and function it makes the function to call."""

    record: Callable[[str, str, Callable[..., None]], Callable[..., None]] | None = None


recorder = _Recorder()


def kernel(name: str, arguments: str) -> Callable[..., None]:
    """A kernel of `library()`. The library must exist; implementations that call this are chosen only if it does."""
    function, record = _kernel(name, arguments), recorder.record
    return function if record is None else record(name, arguments, function)


@cache
def _kernel(name: str, arguments: str) -> Callable[..., None]:
    loaded = library()
    assert loaded is not None
    return loaded.function(name, arguments)


def recordable(name: str) -> int | None:
    """The address of the variant of a kernel that replay.cpp calls, None if the kernel has none."""
    loaded = library()
    return None if loaded is None else loaded.address(f"{name}_recorded")


def load(folder: Path, flags: Sequence[str] = (*FLAGS, INSTRUCTION_SETS["native"][0])) -> Library:
    """The library from `folder`, compiled into it if it is missing or damaged.

    Without a compiler, a library that another compiler built from the same sources is accepted; an image can ship one.
    Raises BuildError if there is no compiler or it fails, OSError if the folder is not writable or not trustworthy.
    """
    if (found := _find(folder, flags)) is not None:
        return found
    if (compiler := find_compiler()) is None:
        raise BuildError(_MISSING_COMPILER)
    path = folder / f"{_fingerprint(flags)}-{_version(compiler)}.so"
    _compile_once(compiler, flags, path, lambda path: _open_sound(path) is not None)
    return Library(path)


def _find(folder: Path, flags: Sequence[str], version: str | None = None) -> Library | None:
    """The library in `folder` that the compiler of this version built. None stands for the compiler of this machine, or
    any if there is none."""
    if version is None:
        version = "*" if (compiler := find_compiler()) is None else _version(compiler)
    found = map(_open_sound, sorted(folder.glob(f"{_fingerprint(flags)}-{version}.so")))
    return next((loaded for loaded in found if loaded is not None), None)


def _compile_once(compiler: list[str], flags: Sequence[str], path: Path, is_usable: Callable[[Path], bool]) -> None:
    """Compile the library unless there is a usable one, perhaps since another process has just compiled it."""
    import fcntl  # not on Windows, where `library()` does not call this

    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_folder(path.parent)
    with path.with_suffix(".lock").open("w") as lock:  # one process compiles, others wait for its library
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_usable(path):
            _compile(compiler, flags, path)


_MISSING_COMPILER = (
    "No C++ compiler was found (g++, c++, clang++, or what CXX names): install g++ to have the kernels compiled at the "
    'next start, or bring them compiled (docs/production.md, "Containers").'
)


def find_compiler() -> list[str] | None:
    """The command of the compiler. As for make, CXX may contain arguments too."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["g++"], ["c++"], ["clang++"]]:
        if (found := shutil.which(command[0])) is not None:
            return [found, *command[1:]]
    return None


def _fingerprint(flags: Sequence[str]) -> str:
    """A hash of everything that the machine code depends on, except the compiler."""
    facts = [*flags, cpu_features() if INSTRUCTION_SETS["native"][0] in flags else ""]
    digest = hashlib.sha256("\0".join(facts).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _version(compiler: list[str]) -> str:
    """A short hash of the compiler's version."""
    output = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    return hashlib.sha256("\0".join([*compiler, output]).encode()).hexdigest()[:16]


def check_folder(folder: Path) -> None:
    """Raises OSError if a library in this folder could not be loaded, or should not be."""
    if not _is_trusted(folder):
        raise OSError(f"{folder} belongs to another user, or anyone may write to it")
    facts = os.statvfs(folder)
    if facts.f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError(f"{folder} is on a file system whose files must not be executed (noexec)")
    if facts.f_bavail * facts.f_frsize < _DISK:
        raise OSError(f"{folder} is on a file system that is full; {_DISK >> 20} MB are needed")


def _is_trusted(path: Path) -> bool:
    """Whether only this user, root, or the owner of Quire's code can have written it."""
    facts = path.stat()
    return facts.st_uid in (0, os.geteuid(), SOURCES.stat().st_uid) and not facts.st_mode & 0o002


def _compile(compiler: list[str], flags: Sequence[str], path: Path) -> None:
    started = time.monotonic()
    print("Compiling CPU kernels (first use) ... ", end="", file=sys.stderr, flush=True)
    with scratch_folder("compiling-", path.parent) as folder:
        temporary = str(folder)
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [f"{temporary}/{source.stem}.o" for source in sources]
        commands = [[*compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        _run(commands, temporary)
        linked = Path(temporary, "linked.so")
        _run([[*compiler, "-shared", "-pthread", *objects, "-o", str(linked)]], temporary)
        # The loader ignores the digest at the end of the file. It reveals a file that lost a part on a full or crashed
        # disk, which could kill the process that loads it.
        code = linked.read_bytes()
        linked.write_bytes(code + hashlib.sha256(code).digest())
        linked.chmod(0o755)
        os.replace(linked, path)
    print(f"{time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def _run(commands: list[list[str]], temporary: str) -> None:
    """Run the commands, as many at once as processors and memory allow.

    Raises BuildError with the first lines of the output of the first command that fails.
    """
    free = limits.free_memory()
    at_once = limits.processors() if free is None else max(1, min(limits.processors(), free // _MEMORY))
    # If memory runs out, Linux should kill the compiler, not this process.
    victim = ["/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh"]
    environment = {**os.environ, "TMPDIR": temporary, "LC_ALL": "C"}

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run([*victim, *command], text=True, env=environment, **pipes)

    with ThreadPoolExecutor(at_once) as pool:
        for command, process in zip(commands, pool.map(run, commands), strict=True):
            if process.returncode != 0:
                print("failed", file=sys.stderr, flush=True)
                output = "\n".join(process.stdout.splitlines()[:8]) or f"exit status {process.returncode}"
                raise BuildError(f"{command[0]} failed:\n{output}")


def _open_sound(path: Path) -> Library | None:
    """The library, or None if it is missing, damaged, refused by the loader, or possibly another user's."""
    try:
        return Library(path) if _is_sound(path) else None
    except OSError:
        return None


def _is_sound(path: Path) -> bool:
    """Whether the library is at this path, undamaged, and not another user's."""
    try:
        content = path.read_bytes()
        sound = hashlib.sha256(content[:-32]).digest() == content[-32:]
        return sound and _is_trusted(path) and _is_trusted(path.parent)
    except OSError:
        return False
