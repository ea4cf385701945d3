"""Build the source distribution, and from it the wheel for Linux on x86-64, which contains compiled CPU kernels.
With --machine aarch64, the wheel is for Linux on AArch64, and any machine can build it.

    pip install . build ziglang auditwheel
    python tools/build_wheel.py [--machine x86_64|aarch64] [--output dist]

The wheel has a kernel library for each instruction set of the machine (quire/ops/cpu/processor.py), and a start selects
the best one that its processor can run. Zig links them against glibc 2.28, which auditwheel checks. One wheel works
with all versions of Python and torch, since the kernels have a plain C interface. Takes about four minutes on two
cores.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC_MINOR = 28  # as in zig_compiler.py
COMPILER = Path(__file__).with_name("zig_compiler.py")


def build(machine: str, output: Path) -> Path:
    """Return the wheel's path. Raises CalledProcessError if a tool fails, SystemExit if the wheel needs a newer
    system."""
    with tempfile.TemporaryDirectory() as temporary:
        run("build", "--sdist", "--outdir", temporary, ROOT)
        (archive,) = Path(temporary).glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(temporary, filter="data")
        tree = archive.with_name(archive.name.removesuffix(".tar.gz"))
        compile_kernels(tree, machine)
        platform = f"manylinux_2_{GLIBC_MINOR}_{machine}"
        run("build", "--wheel", f"--config-setting=--build-option=--plat-name={platform}", "--outdir", temporary, tree)
        (wheel,) = Path(temporary).glob("*.whl")
        check(wheel, machine)
        output.mkdir(parents=True, exist_ok=True)
        for file in (archive, wheel):
            (output / file.name).write_bytes(file.read_bytes())
    return output / wheel.name


def compile_kernels(tree: Path, machine: str) -> None:
    """Compile the kernels of an unpacked source distribution into the tree, for each instruction set of the machine."""
    sys.path.insert(0, str(tree))
    os.environ["CXX"] = f"{sys.executable} {COMPILER} {machine}"
    from quire.ops.cpu.build import PACKAGED, SOURCES, compile_for
    from quire.ops.cpu.processor import INSTRUCTION_SETS

    assert SOURCES.is_relative_to(tree), f"the kernels of {SOURCES} would be compiled"
    for name in INSTRUCTION_SETS:
        if name != "native" and name.startswith("neon") == (machine == "aarch64"):
            compile_for(name, PACKAGED)
    for lock in PACKAGED.glob("*.lock"):
        lock.unlink()


def check(wheel: Path, machine: str) -> None:
    """Exit if auditwheel finds that the wheel needs a newer system than its tag states."""
    shown = run("auditwheel", "show", wheel)
    print(shown)
    needed = re.search(rf'"manylinux_2_(\d+)_{machine}"', " ".join(shown.split()))
    if needed is None or int(needed[1]) > GLIBC_MINOR:
        raise SystemExit(f"{wheel.name} is not fit for manylinux_2_{GLIBC_MINOR}_{machine}")


def run(module: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for both files (default: dist)")
    parser.add_argument("--machine", choices=("x86_64", "aarch64"), default="x86_64", help="(default: x86_64)")
    chosen = parser.parse_args()
    print(build(chosen.machine, chosen.output.resolve()))
