"""Triton's C code is compiled where a compiler is, and used where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("triton")
from quire.ops import launchers

_HEADER = Path(sysconfig.get_paths()["include"]) / "Python.h"
needs_compiler = pytest.mark.skipif(
    launchers.find_compiler() is None or not _HEADER.exists(), reason="there is no C compiler, or no Python.h"
)

_LOAD = """
from pathlib import Path
import triton
from quire.ops import launchers
assert launchers.find_compiler() is None
launchers.use_folder(Path({folder!r}))
from triton.backends.nvidia.driver import CudaUtils
print(CudaUtils().load_binary)
"""


@pytest.mark.slow
@needs_compiler
def test_a_machine_without_a_compiler_loads_the_library_that_another_one_compiled(tmp_path: Path):
    """A library of functions that do nothing stands in for the driver, which only a machine with a GPU has."""
    assert launchers.compile_launchers([], tmp_path) == 1
    assert launchers.compile_launchers([], tmp_path) == 0  # it is there
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", launchers._driver_source())))
    (tmp_path / "driver.c").write_text("\n".join(f"int {name}(void) {{ return 0; }}" for name in functions))
    compiler = launchers.find_compiler()
    assert compiler
    driver = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", tmp_path / "driver.c", "-o", driver], check=True)
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "CC": "",
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    program = _LOAD.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "load_binary" in done.stdout, done.stderr


def test_triton_is_used_without_a_compiler_if_its_library_was_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not launchers.are_compiled()
    path = launchers._path(tmp_path / "quire", launchers._driver_source())
    path.parent.mkdir(parents=True)
    path.touch()
    assert launchers.are_compiled()
