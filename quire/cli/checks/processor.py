"""Checks of the processor, the compiler and the CPU kernels."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.cli.checks.engine import need_engine
from quire.cli.checks.finding import Finding, note, ok, problem
from quire.cli.checks.folders import why_not_writable
from quire.messages.errors import error_text
from quire.platform.folders import cache_folder, private_folder

# Processor features and their common names.
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512vbmi": "AVX-512 VBMI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "asimddp": "dot products",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
}
_TESTED_MACHINE = "x86_64"
_SECONDS = 20  # for the compiler
# The kernels' requirements on a compiler: vectors of 16 lanes, their permutations, C++17 and threads.
_PROGRAM = """
#include <atomic>
#include <thread>
typedef float f32x16 __attribute__((vector_size(64)));
extern "C" void quire_probe(float* x) {
  f32x16 v = {};
  if constexpr (sizeof v == 64) __builtin_memcpy(&v, x, sizeof v);
  v = __builtin_shufflevector(v, v, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  std::atomic<int> count{0};
  std::thread([&] { count++; }).join();
  v += static_cast<float>(count);
  __builtin_memcpy(x, &v, sizeof v);
}
"""


def check_processor() -> Iterator[Finding]:
    need_engine()
    from quire.ops.cpu.processor import USED_FEATURES, cpu_features

    machine = platform.machine()
    features = set(cpu_features().split())
    names = {key: name for key, name in _FEATURES.items() if key in features}
    used = [name for key, name in names.items() if key in USED_FEATURES]
    unused = [name for name in names.values() if name not in used]
    found = f"{_model_name() or machine} with {', '.join(used) or 'no vector instructions that the kernels know'}"
    found += f", and with {', '.join(unused)}, which the kernels do not use" if unused else ""
    if machine != _TESTED_MACHINE:
        yield note(f"{found}; Quire is not tested on {machine}", "Compare some answers with those of another engine.")
    elif "avx2" not in features:
        advice = "In a virtual machine, have the hypervisor pass the host's instructions through."
        yield note(f"{found}; without AVX2, steps are several times slower", advice)
    else:
        yield ok(found)


def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def check_compiler() -> Iterator[Finding]:
    need_engine()
    from quire.ops.cpu.build import find_compiler, find_library

    compiler = find_compiler()
    is_needed = find_library() is None
    if compiler is None:
        found = f"{os.environ['CXX']!r}, which CXX names, is missing" if os.environ.get("CXX") else "none was found"
        advice = "Install g++ 12 or newer, or clang++, or name another one in the environment variable CXX."
        yield problem(found, advice) if is_needed else ok(f"{found}, and none is needed: the kernels are compiled")
        return
    command = " ".join(compiler)
    failure = _failure_of(compiler)
    if failure is None:
        done = subprocess.run([*compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True)
        yield ok(f"{command} {done.stdout.strip()}")
    elif is_needed:
        advice = "Install g++ 12 or newer, or clang++, and name it in the environment variable CXX."
        yield problem(f"{command} cannot compile the CPU kernels: {failure}", advice)
    else:
        advice = "The kernels are compiled already, but another version of Quire will need a compiler that works."
        yield note(f"{command} does not work: {failure}", advice)


def _failure_of(compiler: list[str]) -> str | None:
    """Return the reason why it cannot compile a small library with the kernels' options, or None.

    Raises OSError if there is no folder for the library.
    """
    from quire.ops.cpu.build import FLAGS
    from quire.ops.cpu.processor import INSTRUCTION_SETS

    folder = private_folder("quire-doctor-")
    try:
        source = folder / "probe.cpp"
        source.write_text(_PROGRAM)
        flags = [*FLAGS, *INSTRUCTION_SETS["native"][0].split(), "-shared"]
        done = subprocess.run(
            [*compiler, *flags, str(source), "-o", str(folder / "probe.so")],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_SECONDS} s"
    except OSError as error:
        return error_text(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode == 0:
        return None
    lines = [line.replace(f"{folder}/", "") for line in done.stderr.splitlines()]
    return next((line for line in lines if "error" in line), f"exit status {done.returncode}")


def check_kernels() -> Iterator[Finding]:
    if sys.platform not in ("linux", "darwin"):
        advice = "Run Quire on Linux, such as in a virtual machine."
        yield note("not for this system, and without them, steps take at least five times as long", advice)
        return
    need_engine()
    from quire.ops.cpu import build
    from quire.ops.cpu.processor import INSTRUCTION_SETS, USED_FEATURES, cpu_features

    if (library := build.find_library()) is not None:
        name = build.instruction_set_of(library)
        usable = USED_FEATURES & set(cpu_features().split())
        found = f"compiled for {'this processor' if name == 'native' else name}: {library.path}"
        if name == "native" or usable <= INSTRUCTION_SETS[name][1]:
            yield ok(found)
        else:
            advice = "Install a compiler, or bring kernels for this processor (quire compile --cpu)."
            yield note(f"{found}; this processor can do more", advice)
        return
    if build.find_compiler() is None:
        advice = "Install a compiler, or bring the kernels compiled (quire compile --cpu)."
        yield problem("not compiled, and there is no compiler: steps take at least five times as long", advice)
    elif reason := _why_not_kept():
        advice = "Set XDG_CACHE_HOME to a folder that this user can write, or bring the kernels compiled."
        yield note(
            f"every start compiles those of its model, which takes 10 s or more on two cores, since {reason}", advice
        )
    else:
        compiled, number = build.count_units()
        found = f"{compiled} of {number} units are compiled" if compiled else "not compiled yet"
        yield ok(
            f"{found}: a start compiles the others in the background, and computes with PyTorch's operations "
            "until those are there that its model needs"
        )


def _why_not_kept() -> str | None:
    """Return the reason why compiled kernels cannot be stored in the cache folder, or None."""
    from quire.ops.cpu.build import check_folder

    cache = cache_folder()
    if cache is None:
        return "this user has no home folder"
    folder = cache / "kernels"
    if (reason := why_not_writable(folder)) is not None:
        return f"{folder} cannot be written: {reason}"
    try:
        if folder.is_dir():
            check_folder(folder)
    except OSError as error:
        return error_text(error)
    return None
