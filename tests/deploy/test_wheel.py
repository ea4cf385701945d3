"""The wheel of tools/build_wheel.py: its kernels compute what the references do, and it needs no compiler anywhere."""

from __future__ import annotations

import os
import shutil
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.ops.cpu import build
from support.commands import run
from support.emulated import PROCESSORS, EmulatedLibrary, need_emulator
from support.kernel_checks import check_against_references

PROMPT = "Once upon a time"
ARGUMENTS = ["--temperature", "0", "--max-tokens", "30", "--dtype", "float32", "--max-model-len", "256"]
NAMES = [name for name in build.INSTRUCTION_SETS if name.startswith(("amx", "avx"))]

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def libraries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those of the wheel, by their instruction sets. None is loaded here, since loading runs some instructions."""
    return unpacked_libraries(wheel, tmp_path_factory.mktemp("wheel"))


def unpacked_libraries(wheel: Path, folder: Path) -> dict[str, Path]:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    paths = folder.glob("quire/ops/cpu/compiled/*")
    starts = {build._fingerprint(build._flags(name)): name for name in build.INSTRUCTION_SETS}
    return {starts[path.name.partition("-")[0]]: path for path in paths}


def test_the_wheel_is_one_for_all_versions_of_python_with_all_instruction_sets(wheel, libraries):
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    assert wheel.stat().st_size < 20 << 20
    assert sorted(libraries) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_of_a_wheel_compute_what_the_references_do(libraries, monkeypatch, name):
    if lacking := build.INSTRUCTION_SETS[name][1] - set(build.cpu_features().split()):
        pytest.skip(f"this processor lacks {', '.join(sorted(lacking))}")
    check_against_references(build.Library(libraries[name]), monkeypatch)


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs Debian's package qemu-user")
def test_a_processor_that_has_only_avx2_runs_the_kernels_for_it(wheel, tmp_path):
    """An emulated one: any other instruction would end the process. /proc/cpuinfo is that of the real processor, so
    nothing else may be compiled or chosen here."""
    case = f"{__file__}::{test_the_kernels_of_a_wheel_compute_what_the_references_do.__name__}[avx2]"
    command = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-m", "pytest", "-n", "0", "-m", "nightly", case]
    environment = {"CXX": "missing-compiler", "XDG_CACHE_HOME": str(tmp_path), "QUIRE_WHEEL": str(wheel)}
    assert "1 passed" in run(command, **environment).stdout


def test_the_kernels_of_a_wheel_for_aarch64_compute_what_the_references_do(monkeypatch, tmp_path):
    need_emulator()
    for package in ("build", "ziglang", "auditwheel"):
        pytest.importorskip(package)
    tool = Path(__file__).parents[2] / "tools/build_wheel.py"
    run([sys.executable, str(tool), "--machine", "aarch64", "--output", str(tmp_path / "dist")])
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_28_aarch64.whl")
    libraries = unpacked_libraries(wheel, tmp_path)
    assert sorted(libraries) == sorted(PROCESSORS)
    for name, path in libraries.items():
        with monkeypatch.context() as patch:
            library = EmulatedLibrary(path, name, patch)
            check_against_references(library, patch)
            library.close()


@pytest.fixture(scope="module")
def expected() -> str:
    (output,) = LLM(dtype="float32", max_model_len=256).generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False
    )
    return PROMPT + output.outputs[0].text


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that a user without privileges can use, with a virtual environment of theirs."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)  # torch is large


def confined(place: Path, can_write: bool) -> list[str]:
    """A prefix of a command: a user without a name, home and privileges, on a root that is read-only, with no programs
    but those of the virtual environment."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs Debian's package bubblewrap")
    bind = "--bind" if can_write else "--ro-bind"
    names = [name for name in os.environ if name.startswith(("PIP_", "SSL_CERT_FILE"))]  # how packages are downloaded
    pip = [word for name in names for word in ("--setenv", name, os.environ[name])]
    temporary = ["--setenv", "TMPDIR", str(place / "tmp")] if can_write else []
    return [
        "bwrap",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        bind,
        str(place),
        str(place),
        "--unshare-user",
        "--uid",
        "54321",
        "--gid",
        "54321",
        "--clearenv",
        "--setenv",
        "PATH",
        str(place / "bin"),
        "--setenv",
        "OMP_NUM_THREADS",
        "1",
        *pip,
        *temporary,
        "--chdir",
        "/",
        "--",
    ]


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_installed_without_a_compiler_the_wheel_compiles_nothing(wheel, place, expected, installer):
    venv.create(place, with_pip=installer == "pip")
    (place / "tmp").mkdir()
    python = str(place / "bin/python")
    if installer == "pip":
        command = [python, "-m", "pip", "install", "--no-cache-dir", str(wheel)]
    else:
        uv = pytest.importorskip("uv").find_uv_bin()
        command = [uv, "pip", "install", "--no-cache", "--python", python, *uv_options(), str(wheel)]
    run([*confined(place, can_write=True), *command])
    result = run([*confined(place, can_write=False), "quire", "generate", *ARGUMENTS, "--log-level", "INFO", PROMPT])
    assert result.stdout.rstrip("\n") == expected
    assert "attention backend cpu" in result.stderr
    assert "Compiling" not in result.stderr
    assert "WARNING" not in result.stderr


def uv_options() -> list[str]:
    """What pip is configured to: uv does not read pip's configuration."""
    listed = run([sys.executable, "-m", "pip", "config", "list"]).stdout
    values = dict(line.split("=", 1) for line in listed.splitlines() if line.startswith("global."))
    options = []
    for key in ("find-links", "extra-index-url"):
        for value in values.get(f"global.{key}", "''").strip("'").split():
            options += [f"--{key}", value]
    return options


@pytest.mark.skipif(build.find_compiler() is None, reason="no compiler here")
def test_installed_from_the_source_distribution_the_kernels_are_compiled_at_the_first_run(dist, place, expected):
    (archive,) = dist.glob("*.tar.gz")
    venv.create(place, with_pip=True)
    python = str(place / "bin/python")
    run([python, "-m", "pip", "install", "--no-cache-dir", str(archive)])
    cache = str(place / "cache")
    result = run([python, "-m", "quire", "generate", *ARGUMENTS, PROMPT], XDG_CACHE_HOME=cache, PYTHONPATH="")
    assert result.stdout.rstrip("\n") == expected
    assert "compiled in the background" in result.stderr
