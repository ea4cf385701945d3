"""The C code with which Triton loads and launches kernels, compiled ahead by `quire compile`.

Triton compiles it on the machine with the GPU, with a C compiler and Python's headers, which an image may lack: one
library for all kernels (Triton 3.9), and until Triton 3.6 another one for each list of argument types. This module
compiles the same sources on a machine without a GPU, and gives the libraries to Triton when it asks for them.
"""

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.platform.folders import cache_folder

_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def find_compiler() -> str | None:
    """The C compiler, as Triton looks for it."""
    names = os.environ.get("CC"), "gcc", "clang", "cc"
    return next((found for name in names if name and (found := shutil.which(name))), None)


def are_compiled() -> bool:
    """Whether the library that Triton needs for NVIDIA's GPUs is in the cache folder. Does not import Triton."""
    folder = cache_folder()
    return folder is not None and _path(folder, _driver_source()).is_file()


def _driver_source() -> str:
    spec = find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "backends" / "nvidia" / "driver.c").read_text()


def _path(folder: Path, source: str) -> Path:
    return folder / "launchers" / f"{hashlib.sha256(source.encode()).hexdigest()}{_SUFFIX}"


def use_folder(folder: Path | None) -> None:
    """Have Triton take the libraries from this folder. Those that are not there are compiled as usual."""
    import triton

    if folder is None or not (folder / "launchers").is_dir():
        return

    def find_or_build(name: str, source: str, *arguments: Any) -> str:
        shipped = _path(folder, Path(source).read_text())
        if shipped.is_file():
            return str(shipped)
        if find_compiler() is None:
            raise RuntimeError(
                "Triton needs a C compiler to launch a kernel: install gcc, or run quire compile with "
                "the options of this engine when the image is built"
            )
        triton.knobs.build.impl = None
        try:
            return str(triton.runtime.build._build(name, source, *arguments, []))
        finally:
            triton.knobs.build.impl = find_or_build

    triton.knobs.build.impl = find_or_build


def compile_launchers(kernels: Iterable[Any], folder: Path) -> int:
    """Compile the libraries that kernels for NVIDIA's GPUs need into the folder. kernels: Triton's compiled kernels.

    Returns how many were missing. Raises OSError or RuntimeError if there is no compiler, or if it fails.
    """
    from triton.backends.nvidia import driver

    sources = {_driver_source()}
    if make := getattr(driver, "make_launcher", None):
        sources |= {_launcher_source(make, kernel) for kernel in kernels}
    missing = [(source, path) for source in sorted(sources) if not (path := _path(folder, source)).is_file()]
    with tempfile.TemporaryDirectory() as temporary:
        for source, path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            _compile(source, path, Path(temporary), driver.include_dirs)
    return len(missing)


def _launcher_source(make: Callable[..., str], kernel: Any) -> str:
    """The source of a kernel's launcher, as Triton's CudaLauncher makes it."""
    source = kernel.src
    names = source.fn.arg_names
    constants = {(names.index(at),) if isinstance(at, str) else at: value for at, value in source.constants.items()}
    return make(constants, dict(source.signature), getattr(kernel.metadata, "tensordesc_meta", None))


def _compile(source: str, path: Path, temporary: Path, include: list[str]) -> None:
    """Compile a source that is linked with NVIDIA's libcuda, for which an empty library of that name stands in."""
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C compiler was found (gcc, clang, cc, or what CC names)")
    stub = temporary / "libcuda.so.1"
    file = temporary / "source.c"
    library = temporary / "library.so"
    file.write_text(source)
    headers = [*include, sysconfig.get_paths()["include"]]
    common = [compiler, "-O3", "-shared", "-fPIC", "-Wno-psabi"]
    if not stub.exists():
        _run([*common, "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", str(stub)])
    _run(
        [
            *common,
            str(file),
            "-Wl,--no-as-needed",
            f"-L{temporary}",
            "-l:libcuda.so.1",
            *(f"-I{h}" for h in headers),
            "-o",
            str(library),
        ]
    )
    shutil.copyfile(library, path.with_suffix(f".{os.getpid()}"))
    path.with_suffix(f".{os.getpid()}").replace(path)


def _run(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed:\n" + "\n".join(process.stderr.splitlines()[:8]))
