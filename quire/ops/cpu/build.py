"""The C++ kernels of this folder, compiled on first use.

Each translation unit (units.py) becomes a shared library in the user's cache folder. A wheel contains one precompiled
library with all units. Libraries have a plain C interface and are loaded with ctypes. They use no torch headers, so
compiling takes seconds. They use their own threads (team.h), since with torch's OpenMP each operation would wait for
the slowest thread.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quire.messages.errors import error_text
from quire.ops.cpu.background import Background
from quire.ops.cpu.compiling import BuildError, Job, compile_library, compile_units, is_sealed, shown_progress
from quire.ops.cpu.processor import INSTRUCTION_SETS, USED_FEATURES, cpu_features
from quire.ops.cpu.units import TEAM, read_units
from quire.platform import limits
from quire.platform.folders import cache_folder, scratch_folder

logger = logging.getLogger("quire")

SOURCES = Path(__file__).parent
PACKAGED = SOURCES / "compiled"  # the libraries of a wheel, one for each instruction set: tools/build_wheel.py
# Without errno, a square root is one instruction. See fma in lanes.h for the reason why contraction is disabled.
FLAGS = ("-O3", "-std=c++17", "-pthread", "-fPIC", "-Wno-psabi", "-fno-math-errno", "-ffp-contract=off")
_DISK = 1 << 25  # bytes of disk that compiling needs
_MEMORY = 400 << 20  # bytes that the compiler needs for the largest source
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of tensor types, see with_type in vector.h
_ARGUMENTS = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}


_SHARED = ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))


class Library:
    """The loaded kernels, in one file. flags: the compiler's flags for the instruction set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaded = ctypes.CDLL(str(path))

    @property
    def identity(self) -> str:
        """An identifier that differs for each version of the kernels, the compiler and its options."""
        return self.path.name

    def function(self, name: str, arguments: str) -> Callable[..., None]:
        """Return a kernel. `arguments` has a letter for each argument: p(ointer), i(nt32), l (int64), f(loat)."""
        function: Any = self._file_with(name)[name]
        function.argtypes = [_ARGUMENTS[letter] for letter in arguments]
        function.restype = None
        return function  # type: ignore[no-any-return]

    def address_for_replay(self, name: str) -> int | None:
        """Return the address of the kernel variant that replay.cpp calls, or None if there is none."""
        try:
            return ctypes.cast(self._file_with(name)[f"{name}_recorded"], ctypes.c_void_p).value
        except AttributeError:
            return None

    def _file_with(self, name: str) -> ctypes.CDLL:
        """Return the loaded file that contains a kernel."""
        return self._loaded


class UnitLibrary(Library):
    """Kernels in one file per translation unit (units.py). A file is loaded when it is needed, and compiled if it is
    missing or damaged.

    folder: the folder of the files; None compiles them for this process alone. Without a compiler, files that another
    compiler built from the same sources are accepted, so an image can contain them.
    """

    def __init__(self, folder: Path | None, flags: Sequence[str]) -> None:
        self.folder = folder
        self.flags = flags
        self.units = read_units(SOURCES)
        self._compiler = find_compiler()
        self._version = "*" if self._compiler is None else _version(self._compiler)
        self._facts = _facts(flags)
        self._names = dict[str, str]()
        self._files: dict[str, ctypes.CDLL] = {}
        self._lock = threading.RLock()
        self._unit_of = {kernel: unit.name for unit in self.units.values() for kernel in unit.kernels}

    @property
    def path(self) -> Path:  # type: ignore[override]
        """The path of the unit on which the others depend, or of any other unit if that one is missing."""
        name = TEAM if TEAM in self.units else min(self.units)
        return Path(self._files[name]._name) if name in self._files else self._path(name)

    @property
    def identity(self) -> str:
        names = [self._path(name).name for name in sorted(self.units)]
        return hashlib.sha256("\0".join(names).encode()).hexdigest()

    @property
    def missing(self) -> list[str]:
        """Return the units that have no file. This loads nothing."""
        return [name for name in self.units if name not in self._files and not self._found(name)]

    def load(self, names: Iterable[str] | None = None) -> list[str]:
        """Load these units (None: all) without compiling. Returns the missing or damaged ones."""
        return [name for name in self._wanted(names) if not self._load(name)]

    def compile(self, names: Iterable[str] | None = None) -> None:
        """Load these units (None: all), and compile those that are missing or damaged.

        Raises BuildError if there is no compiler or it fails, OSError if the folder is not writable or not trustworthy.
        """
        with self._lock:
            if missing := self.load(names):
                if self.folder is None:
                    with scratch_folder("quire-kernels-") as folder:
                        self._compile(missing, folder)
                else:
                    self._compile(missing, self.folder)

    def jobs(self, names: Iterable[str], folder: Path) -> list[Job]:
        """Return the commands that compile units, the slowest first, with their output files in the folder. Deletes
        damaged files. Raises BuildError if there is no compiler, OSError if the folder cannot be used."""
        if self._compiler is None:
            raise BuildError(_MISSING_COMPILER)
        prepare_folder(folder)
        for name in names:
            if not self._load(name):
                self._path(name, folder).unlink(missing_ok=True)
        shared = [*self._compiler, *self.flags, *_SHARED]
        return [
            ([*shared, *(unit := self.units[name]).flags, str(unit.source)], self._path(name, folder))
            for name in sorted(names, key=lambda name: -len(self.units[name].text))
        ]

    def _compile(self, names: Sequence[str], folder: Path) -> None:
        jobs = self.jobs(names, folder)
        with shown_progress():
            compile_units(jobs, _at_once())
        for name in names:
            self._files.setdefault(name, _open(self._path(name, folder), name))

    def _wanted(self, names: Iterable[str] | None) -> list[str]:
        wanted = set(self.units if names is None else names) & set(self.units)
        return sorted(wanted, key=lambda name: (name != TEAM, name))

    def _path(self, name: str, folder: Path | None = None) -> Path:
        if name not in self._names:
            self._names[name] = f"{name}-{self.units[name].fingerprint(self._facts)}-{self._version}.so"
        return (folder or self.folder or Path()) / self._names[name]

    def _found(self, name: str) -> list[Path]:
        """Return the files of a unit."""
        if self.folder is None:
            return []
        path = self._path(name)
        return sorted(self.folder.glob(path.name)) if self._version == "*" else [path] if path.exists() else []

    def _load(self, name: str) -> bool:
        """Load a unit's file if it exists and is undamaged. Returns whether it is loaded."""
        for path in [] if name in self._files else self._found(name):
            if _is_sound(path):
                with contextlib.suppress(OSError):
                    self._files[name] = _open(path, name)
                    break
        return name in self._files

    def _file_with(self, name: str) -> ctypes.CDLL:
        unit = self._unit_of[name]
        if unit not in self._files:
            self.compile({TEAM, unit})
        return self._files[unit]


def _open(path: Path, unit: str) -> ctypes.CDLL:
    """Load a unit's file. The other units find the functions of the first unit by name."""
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL if unit == TEAM else ctypes.RTLD_LOCAL)


_chosen = ["native"]  # one choice per process, whose kernels are one library


def choose_instruction_set(name: str) -> None:
    """Choose the instruction set of all kernels of this process. Raises ValueError if the processor lacks it."""
    if lacking := INSTRUCTION_SETS[name][1] - set(cpu_features().split()):
        raise ValueError(f"cpu_isa={name!r}: this processor lacks {', '.join(sorted(lacking))}")
    if name != _chosen[0]:
        _chosen[0] = name
        library.cache_clear()
        _kernel.cache_clear()


@dataclass
class _Plan:
    """The kernels that the engines of this process need. units: None for all. may_defer: whether steps may run
    PyTorch's operations until the kernels are ready. background: compiles them. completes: whether units that no engine
    needs are already being compiled, or cannot be compiled."""

    units: frozenset[str] | None = None
    may_defer: bool = False
    background: Background | None = None
    completes: bool = False


_plan = _Plan()


def prepare(units: Iterable[str], may_defer: bool) -> None:
    """Declare the units that an engine of this process needs, before it chooses kernels.

    may_defer: whether the engine may start with PyTorch's operations while the units are compiled in the background;
    `library()` is None until then.
    """
    _plan.units = (_plan.units or frozenset()) | frozenset(units)
    _plan.may_defer = may_defer
    if library.cache_info().currsize and isinstance(found := library(), UnitLibrary):
        found.compile(units)


def background() -> Background | None:
    """Return the process that compiles the kernels of `library()` in the background, or None."""
    return _plan.background


def count_units() -> tuple[int, int]:
    """Return the number of units in this user's cache folder, and the number of all units. This loads nothing."""
    units = UnitLibrary(None if (folder := cache_folder()) is None else folder / "kernels", _flags(_chosen[0]))
    return len(units.units) - len(units.missing), len(units.units)


def is_deferred() -> bool:
    """Return whether required kernels are being compiled in the background."""
    return _plan.background is not None and not _plan.background.has_ended


@cache
def library() -> Library | None:
    """Return the kernels, compiled if necessary. Returns None, after one warning, if they cannot be compiled, and while
    they are being compiled in the background (see `prepare`)."""
    if sys.platform not in ("linux", "darwin"):
        return None
    if is_deferred():
        return None
    try:
        if (found := find_library()) is None:
            found = _compiled()
        if isinstance(found, UnitLibrary) and _plan.units is not None:
            _complete(found)
        return found
    except (BuildError, OSError) as error:
        logger.warning(
            "There are no compiled CPU kernels: steps run PyTorch's operations, which take five times as long or more. "
            "%s",
            error_text(error),
        )
        return None


def find_library() -> Library | None:
    """Return the kernels if they are already compiled, else None."""
    if sys.platform not in ("linux", "darwin"):
        return None
    folder = cache_folder()
    name = _chosen[0]
    packaged = _best(PACKAGED) if name == "native" else _find(PACKAGED, _flags(name), "*")
    if packaged is not None or folder is None:
        return packaged
    shipped = _best(folder / "kernels", is_compiler_better=True) if name == "native" else None
    found = shipped or _find(folder / "kernels", _flags(name))
    if found is None and not (units := UnitLibrary(folder / "kernels", _flags(name))).load(_plan.units):
        found = units
    return found


def instruction_set_of(library: Library) -> str:
    """Return the name of the instruction set for which the library was compiled."""
    if isinstance(library, UnitLibrary):
        return next(name for name in INSTRUCTION_SETS if _flags(name) == library.flags)
    return next(name for name in INSTRUCTION_SETS if library.path.name.startswith(_fingerprint(_flags(name))))


def _flags(name: str) -> list[str]:
    return [*FLAGS, *INSTRUCTION_SETS[name][0].split()]


def _best(folder: Path, is_compiler_better: bool = False) -> Library | None:
    """Return the best library for a named instruction set in `folder` that this processor can run.

    is_compiler_better: with a compiler, accept only libraries with all instructions that kernels can use here.
    """
    features = set(cpu_features().split())
    for name, (_, needed) in INSTRUCTION_SETS.items():
        serves = name != "native" and needed <= features
        if is_compiler_better:
            serves = serves and (features & USED_FEATURES <= needed or find_compiler() is None)
        if serves and (found := _find(folder, _flags(name), "*")) is not None:
            return found
    return None


def _compiled() -> Library | None:
    """Return the required units, compiled now, or None if they are compiled in the background."""
    flags = _flags(_chosen[0])
    folder = cache_folder()
    if _plan.background is not None and _plan.background.problem:
        raise BuildError(_plan.background.problem)
    reason = "this user has no home folder"
    if folder is not None:
        units = UnitLibrary(folder / "kernels", flags)
        try:
            if _plan.may_defer and _plan.background is None:
                _plan.background = _start(units, units.load(_plan.units))
                return None
            units.compile(_plan.units)
            return units
        except OSError as error:
            reason = error_text(error)
    units = UnitLibrary(None, flags)
    units.compile(_plan.units)
    logger.warning(
        "The compiled CPU kernels cannot be kept, so every start compiles them again: %s. Set XDG_CACHE_HOME to a "
        "folder that this user can write.",
        reason,
    )
    return units


def _complete(found: UnitLibrary) -> None:
    """Compile the remaining units in the background, so that later engines need not wait for them."""
    if _plan.completes or _plan.background is not None:
        return
    _plan.completes = True
    if found.folder is not None and find_compiler() is not None and found.missing:
        with contextlib.suppress(OSError):
            _start(found, [])


def _start(units: UnitLibrary, first: list[str]) -> Background:
    """Compile missing units in the background. Raises BuildError, OSError."""
    assert units.folder is not None
    then = [name for name in units.missing if name not in first]
    needed, others = (units.jobs(names, units.folder) for names in (first, then))
    return Background(needed, others, _at_once(), library.cache_clear)


def compile_for(name: str, folder: Path) -> Path:
    """Return the library for an instruction set, which this processor may lack, compiled into `folder` if missing.

    Raises BuildError if there is no compiler or it fails, OSError if the folder is not writable or not trustworthy.
    """
    compiler = find_compiler()
    flags = _flags(name)
    if compiler is None:
        raise BuildError(_MISSING_COMPILER)
    path = folder / f"{_fingerprint(flags)}-{_version(compiler)}.so"
    prepare_folder(folder)
    if not _is_sound(path):  # not loaded: that might run instructions that this processor lacks
        sources = [[*unit.flags, str(unit.source)] for unit in read_units(SOURCES).values()]
        with shown_progress():
            compile_library([*compiler, *flags], sources, path, _at_once())
    return path


class _Recorder(threading.local):
    """A thread's hook for kernel calls. It wraps a kernel, given its name, arguments and function."""

    record: Callable[[str, str, Callable[..., None]], Callable[..., None]] | None = None


recorder = _Recorder()


def kernel(name: str, arguments: str) -> Callable[..., None]:
    """Return a kernel of `library()`, which must exist. (Without it, no implementation that calls this is chosen.)"""
    function = _kernel(name, arguments)
    record = recorder.record
    return function if record is None else record(name, arguments, function)


@cache
def _kernel(name: str, arguments: str) -> Callable[..., None]:
    loaded = library()
    assert loaded is not None
    return loaded.function(name, arguments)


def recordable(name: str) -> int | None:
    """Return the address of the kernel variant that replay.cpp calls, or None if there is none."""
    loaded = library()
    return None if loaded is None else loaded.address_for_replay(name)


def load(folder: Path, flags: Sequence[str] = (*FLAGS, INSTRUCTION_SETS["native"][0])) -> UnitLibrary:
    """Return the kernels in `folder`, compiled if missing or damaged. Raises like UnitLibrary.compile."""
    loaded = UnitLibrary(folder, flags)
    loaded.compile()
    return loaded


def _find(folder: Path, flags: Sequence[str], version: str | None = None) -> Library | None:
    """Return the library in `folder` that was built by the compiler of this version. version: None for this machine's
    compiler, or for any if there is none."""
    if version is None:
        version = "*" if (compiler := find_compiler()) is None else _version(compiler)
    found = map(_open_sound, sorted(folder.glob(f"{_fingerprint(flags)}-{version}.so")))
    return next((loaded for loaded in found if loaded is not None), None)


_MISSING_COMPILER = (
    "No C++ compiler was found (g++, c++, clang++, or what CXX names): install g++ to have the kernels compiled at the "
    'next start, or bring them compiled (docs/production.md, "Containers").'
)


def find_compiler() -> list[str] | None:
    """Return the command of the compiler. As for make, CXX may also contain arguments."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["g++"], ["c++"], ["clang++"]]:
        if (found := shutil.which(command[0])) is not None:
            return [found, *command[1:]]
    return None


def _fingerprint(flags: Sequence[str]) -> str:
    """Return a hash of everything that the machine code depends on, except the compiler."""
    digest = hashlib.sha256("\0".join(_facts(flags)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _facts(flags: Sequence[str]) -> list[str]:
    """Return everything that the machine code of all units depends on, except the compiler."""
    return [*flags, cpu_features() if INSTRUCTION_SETS["native"][0] in flags else ""]


def _version(compiler: list[str]) -> str:
    """Return a short hash of the compiler's version."""
    output = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    return hashlib.sha256("\0".join([*compiler, output]).encode()).hexdigest()[:16]


def prepare_folder(folder: Path) -> None:
    """Create a folder for libraries. Raises OSError if libraries cannot or should not be loaded from it."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Raise OSError if libraries cannot or should not be loaded from this folder."""
    if not _is_trusted(folder):
        raise OSError(f"{folder} belongs to another user, or anyone may write to it")
    facts = os.statvfs(folder)
    if facts.f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError(f"{folder} is on a file system whose files must not be executed (noexec)")
    if facts.f_bavail * facts.f_frsize < _DISK:
        raise OSError(f"{folder} is on a file system that is full; {_DISK >> 20} MB are needed")


def _is_trusted(path: Path) -> bool:
    """Return whether only this user, root, or the owner of Quire's code can have written it."""
    facts = path.stat()
    return facts.st_uid in (0, os.geteuid(), SOURCES.stat().st_uid) and not facts.st_mode & 0o002


def _at_once() -> int:
    """Return how many compilers may run at once, given the processors and the memory."""
    free = limits.free_memory()
    return limits.processors() if free is None else max(1, min(limits.processors(), free // _MEMORY))


def _open_sound(path: Path) -> Library | None:
    """Return the library, or None if it is missing, damaged, rejected by the loader, or not trusted."""
    try:
        return Library(path) if _is_sound(path) else None
    except OSError:
        return None


def _is_sound(path: Path) -> bool:
    """Return whether the library exists at this path, is undamaged, and is not another user's."""
    try:
        return is_sealed(path) and _is_trusted(path) and _is_trusted(path.parent)
    except OSError:
        return False
