"""How the C++ kernels come to be: compiled once, found again, rebuilt when damaged, done without where need be."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import platformdirs
import pytest
import torch

import quire.attention.cpu
from quire.attention.base import AttentionShape
from quire.ops import Kernels, Target
from quire.ops.cpu import build
from quire.ops.cpu.processor import USED_FEATURES
from quire.platform.folders import cache_folder
from support.kernel_checks import check_against_references
from support.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems run the reference")
HAS_COMPILER = build.library() is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no compiler here")


@pytest.fixture
def small_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Something that compiles in no time instead of the kernels."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" void set(int* x) { *x = 42; }')
    (sources / "two.cpp").write_text('extern "C" void unset(int* x) { *x = 0; }')
    monkeypatch.setattr(build, "SOURCES", sources)
    return sources


@pytest.fixture
def fresh_process(monkeypatch):
    """`library()` as if nobody had called it."""
    build.library.cache_clear()
    monkeypatch.setattr(build, "_plan", build._Plan())
    yield
    build.library.cache_clear()


class Compiler:
    """The compiler, in a script that lists the sources, and waits while it is held."""

    def __init__(self, folder: Path) -> None:
        self._log, self._gate, script = folder / "compiled", folder / "held", folder / "compiler"
        real = shlex.join(build.find_compiler() or [])
        waiting = f"while [ -e {self._gate} ]; do sleep 0.05; done"
        listing = f'for word; do case "$word" in *.cpp) basename "$word" >>{self._log};; esac; done'
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ {waiting}; {listing}; }}\nexec {real} "$@"\n')
        script.chmod(0o755)
        self.path = str(script)

    def compiled(self) -> list[str]:
        """The sources that were compiled since this was asked last."""
        names = self._log.read_text().split() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return names

    def hold(self) -> None:
        self._gate.touch()

    def let_go(self) -> None:
        self._gate.unlink(missing_ok=True)


@pytest.fixture
def compiler(monkeypatch, tmp_path_factory):
    made = Compiler(tmp_path_factory.mktemp("compiler"))
    monkeypatch.setenv("CXX", made.path)
    yield made
    made.let_go()


def works(library: build.Library) -> bool:
    value = torch.zeros(1, dtype=torch.int32)
    library.function("set", "p")(value.data_ptr())
    return value.item() == 42


@needs_compiler
def test_a_second_start_finds_what_the_first_one_compiled(small_sources, tmp_path, capsys):
    assert works(build.load(tmp_path))
    assert re.search(r"^Compiling CPU kernels \(first use\) \.\.\. \d+\.\d s$", capsys.readouterr().err, re.M)
    assert works(build.load(tmp_path))
    assert capsys.readouterr().err == ""


@needs_compiler
def test_a_changed_source_or_flag_is_another_library(small_sources, tmp_path):
    first = build.load(tmp_path)
    other_flags = build.load(tmp_path, [*build.FLAGS, "-DX"])
    (small_sources / "two.cpp").write_text('extern "C" void unset(int* x) { *x = 1; }')
    assert len({first.identity, other_flags.identity, build.load(tmp_path).identity}) == 3


@pytest.mark.sampled(4)
@needs_compiler
@pytest.mark.parametrize("damage", ["half", "empty", "garbage", "sound garbage"])
def test_a_damaged_library_is_rebuilt(small_sources, tmp_path, damage, capsys):
    sound = build.load(tmp_path / "elsewhere")
    content = sound.path.read_bytes()
    garbage = b"\x7fELF" + b"garbage" * 1000
    damaged = {
        "half": content[: len(content) // 2],
        "empty": b"",
        "garbage": garbage,
        "sound garbage": garbage + build.hashlib.sha256(garbage).digest(),
    }
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / sound.path.name).write_bytes(damaged[damage])
    capsys.readouterr()
    assert works(build.load(folder))
    assert "Compiling" in capsys.readouterr().err
    assert works(build.Library(folder / sound.path.name))


@needs_compiler
def test_of_those_that_start_at_once_only_one_compiles_a_unit(small_sources, tmp_path, compiler):
    with ThreadPoolExecutor(4) as pool:
        assert all(works(library) for library in pool.map(lambda _: build.load(tmp_path), range(4)))
    assert sorted(compiler.compiled()) == ["one.cpp", "two.cpp"]


@needs_compiler
def test_a_change_of_a_source_or_of_a_header_compiles_its_units_alone(small_sources, tmp_path, compiler):
    (small_sources / "shared.h").write_text("// for two.cpp")
    (small_sources / "two.cpp").write_text('#include "shared.h"\nextern "C" void unset(int* x) { *x = 0; }')
    build.load(tmp_path)
    compiler.compiled()
    for changed, unit in (("one.cpp", "one.cpp"), ("shared.h", "two.cpp"), ("two.cpp", "two.cpp")):
        with (small_sources / changed).open("a") as file:
            file.write("\n// another line")
        os.utime(small_sources / changed, ns=(0, hash(changed) % 10**9))
        assert works(build.load(tmp_path))
        assert compiler.compiled() == [unit]


@needs_compiler
def test_an_engine_compiles_the_units_that_it_needs_and_those_of_later_calls(
    small_sources, monkeypatch, tmp_path, compiler, fresh_process
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_complete", lambda found: None)
    build.prepare({"one", "unknown"}, may_defer=False)
    library = build.library()
    assert works(library)
    assert compiler.compiled() == ["one.cpp"]
    assert build.count_units() == (1, 2)
    value = torch.ones(1, dtype=torch.int32)
    library.function("unset", "p")(value.data_ptr())
    assert value.item() == 0
    assert compiler.compiled() == ["two.cpp"]


@needs_compiler
def test_an_engine_may_start_before_its_units_are_compiled_and_all_others_follow(
    small_sources, monkeypatch, tmp_path, compiler, fresh_process
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.hold()
    build.prepare({"one"}, may_defer=True)
    assert build.library() is None
    assert build.is_deferred()
    woken = threading.Event()
    build.background().connect(woken.set)
    assert not woken.is_set()
    compiler.let_go()
    assert woken.wait(60)
    assert build.background().problem == ""
    assert works(build.library())
    eventually(lambda: build.count_units() == (2, 2))
    assert compiler.compiled() == ["one.cpp", "two.cpp"]


@needs_compiler
@pytest.mark.parametrize("failure", ["an error", "killed"])
def test_units_that_cannot_be_compiled_in_the_background_are_a_warning(
    small_sources, monkeypatch, tmp_path, compiler, caplog, fresh_process, failure
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if failure == "an error":
        (small_sources / "one.cpp").write_text("this is not C++; void set(int* x);")
    else:
        compiler.hold()
    build.prepare({"one"}, may_defer=True)
    assert build.library() is None
    if failure == "killed":
        build.background()._process.kill()
    eventually(lambda: not build.is_deferred())
    with caplog.at_level(logging.WARNING, logger="quire"):
        assert build.library() is None
    assert ("one.cpp:1" if failure == "an error" else "ended with status -9") in caplog.text
    compiler.let_go()


def test_each_kernel_is_in_one_unit_and_units_rename_those_of_their_types():
    units = build.read_units(build.SOURCES)
    kernels = [kernel for unit in units.values() for kernel in unit.kernels if kernel.startswith("quire_")]
    assert len(kernels) == len(set(kernels))
    attention = {f"quire_attention_attend_{form}" for form in ("bf16", "float_cells", "float_fp16")}
    assert attention | {"quire_linear"} <= set(kernels)
    assert "quire_attention_attend" not in kernels


def test_without_a_compiler_one_warning_is_given_and_the_reference_runs(monkeypatch, tmp_path, caplog, fresh_process):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING, logger="quire"):
        assert build.library() is None
        assert build.library() is None
        kernels = Kernels(Target(torch.device("cpu"), torch.float32))
    assert "cpu" not in kernels.chosen.values()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    shape = AttentionShape(4, 2, 32, 16, torch.float32, torch.device("cpu"))
    assert "compiled" in str(quire.attention.cpu.CpuAttention.unsupported(shape))


@needs_compiler
def test_a_failing_compiler_is_quoted(small_sources, monkeypatch, tmp_path, caplog, fresh_process):
    (small_sources / "two.cpp").write_text("this is not C++;")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path)
    with caplog.at_level(logging.WARNING, logger="quire"):
        assert build.library() is None
    assert re.search(r"two\.cpp:1.* error", caplog.text)


@pytest.mark.sampled(2)
@needs_compiler
@pytest.mark.parametrize(
    "cache", ["is a file", "of a user without a home", "of others", "is executed nowhere", "is full"]
)
def test_where_the_cache_folder_is_of_no_use_the_kernels_are_compiled_for_this_process(
    cache, small_sources, monkeypatch, tmp_path, caplog, fresh_process
):
    folder, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: folder)
    if cache == "is a file":
        folder.touch()
    elif cache == "of a user without a home":
        folder = Path("~/.cache/quire")
    elif cache == "of others":
        (folder / "kernels").mkdir(parents=True)
        (folder / "kernels").chmod(0o777)
    else:
        facts = {"f_flag": 0, "f_bavail": 1 << 20, "f_frsize": 4096}
        facts |= {"f_flag": os.ST_NOEXEC} if cache == "is executed nowhere" else {"f_bavail": 0}
        real = os.statvfs
        monkeypatch.setattr(
            os, "statvfs", lambda p: SimpleNamespace(**facts) if Path(p).is_relative_to(folder) else real(p)
        )
    library = build.library()
    assert library is not None
    assert works(library)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "XDG_CACHE_HOME" in caplog.text
    assert library.path.parent.parent == temporary
    assert not list(temporary.iterdir())  # the library was removed when it was loaded
    assert not list(tmp_path.rglob("*.so"))
    assert not Path("~").exists()


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(small_sources, tmp_path):
    path = build.load(tmp_path).path
    assert build._open_sound(path) is not None
    path.chmod(0o777)
    assert build._open_sound(path) is None
    path.chmod(0o755)
    tmp_path.chmod(0o777)
    assert build._open_sound(path) is None


@needs_compiler
def test_a_process_without_a_compiler_loads_what_another_compiled(small_sources, monkeypatch, tmp_path):
    path = build.load(tmp_path).path
    monkeypatch.setenv("CXX", "missing-compiler")
    assert build.load(tmp_path).path == path
    with pytest.raises(build.BuildError, match="install g\\+\\+"):
        build.load(tmp_path, [*build.FLAGS, "-DX"])


def test_the_fingerprint_of_a_fixed_instruction_set_is_the_same_on_every_processor(monkeypatch):
    native, avx2 = (build._fingerprint([flag]) for flag in ("-march=native", "-march=x86-64-v3"))
    monkeypatch.setattr(build, "cpu_features", lambda: "flags : another processor")
    assert build._fingerprint(["-march=native"]) != native
    assert build._fingerprint(["-march=x86-64-v3"]) == avx2


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_a_start_takes_what_was_compiled_for_a_processor_like_this_one(
    small_sources, monkeypatch, tmp_path, capsys, fresh_process
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "quire" / "kernels"
    paths = {name: build.compile_for(name, folder) for name in ("avx2", "avx512")}  # this processor may lack avx512
    assert build.compile_for("avx2", folder) == paths["avx2"]
    assert capsys.readouterr().err.count("Compiling") == 2
    features = {name: f"flags : {' '.join(sorted(build.INSTRUCTION_SETS[name][1]))}" for name in build.INSTRUCTION_SETS}
    for processor, is_enough in (("avx2", True), ("avx512-bf16", False)):
        build.library.cache_clear()
        monkeypatch.setattr(build, "cpu_features", lambda processor=processor: features[processor])
        loaded = build.library()
        assert loaded is not None
        assert (loaded.path == paths["avx2"]) == is_enough  # else a better one is compiled
        assert ("Compiling" in capsys.readouterr().err) == (not is_enough)
    (folder / loaded.path.name).unlink()
    build.library.cache_clear()
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    loaded = build.library()
    assert loaded is not None
    assert loaded.path == paths["avx512"]  # without a compiler, the best of those that the processor can run


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_what_a_wheel_brings_is_taken_and_nothing_is_compiled(
    small_sources, monkeypatch, tmp_path, capsys, fresh_process
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "compiled")
    paths = {name: build.compile_for(name, build.PACKAGED) for name in ("avx2", "avx512")}
    capsys.readouterr()
    for processor, taken in (("avx2", "avx2"), ("avx512-bf16", "avx512")):
        features = f"flags : {' '.join(build.INSTRUCTION_SETS[processor][1])}"
        monkeypatch.setattr(build, "cpu_features", lambda features=features: features)
        build.library.cache_clear()
        loaded = build.library()
        assert loaded is not None
        assert loaded.path == paths[taken]
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: Path("~"))  # of a user without a home
    build.library.cache_clear()
    assert build.library() is not None
    monkeypatch.setattr(build, "_chosen", ["avx2"])
    build.library.cache_clear()
    loaded = build.library()
    assert loaded is not None
    assert loaded.path == paths["avx2"]
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "cache").exists()


def test_the_sources_use_no_other_features_of_processors_than_the_build_knows():
    macros = {
        macro
        for source in [*build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.h")]
        for macro in re.findall(r"__((?:AVX|AMX|FMA|BMI|F16C|ARM_)\w*?)(?:__)?\b", source.read_text())
    }
    of_arm = {
        "ARM_NEON": "asimd",
        "ARM_FEATURE_DOTPROD": "asimddp",
        "ARM_FEATURE_MATMUL_INT8": "i8mm",
        "ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16",
    }
    of_x86 = {name.upper().replace("_", "") for name in USED_FEATURES - {*of_arm.values()}}
    assert {macro if macro in of_arm else macro.replace("_", "") for macro in macros} == {*of_arm, *of_x86}


@needs_compiler
def test_the_compiler_needs_no_other_folder_than_that_of_the_library(small_sources, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    assert works(build.load(tmp_path))


@pytest.mark.slow
@needs_compiler
def test_the_kernels_bring_no_openmp_runtime_beside_torchs():
    code = """
import torch
from quire.ops.cpu import build
build.library()
torch.randn(300, 300) @ torch.randn(300, 300)
print(open("/proc/self/maps").read())
"""  # in a process of its own: other tests load libraries that bring theirs
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    mapped = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    assert len([path for path in mapped if re.search(r"lib(g|i|)omp", Path(path).name)]) == 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("name", [pytest.param("avx512", marks=pytest.mark.nightly), "avx2"])
def test_the_kernels_compiled_for_lesser_processors(monkeypatch, tmp_path, name):
    if build.INSTRUCTION_SETS[name][1] - set(build.cpu_features().split()):
        pytest.skip("this processor is a lesser one itself")
    folder = (cache_folder() or tmp_path) / "kernels"  # so that the test below finds what was compiled
    check_against_references(build.Library(build.compile_for(name, folder)), monkeypatch)


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_an_instruction_set_can_be_pinned(monkeypatch):
    """It is the process's, so in one of its own."""
    code = """
import sys
from quire import LLM, SamplingParams
from quire.ops.cpu import build
llm = LLM(cpu_isa=sys.argv[1], max_model_len=128, dtype="float32")
(made,) = llm.generate("Once", SamplingParams(temperature=0, max_tokens=20))
print(build.library().path.name, *made.outputs[0].token_ids)
"""
    said = [
        subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True).stdout.split()
        for name in ("native", "avx2")
    ]
    assert said[0][0] != said[1][0]
    assert said[0][1:] == said[1][1:]
    monkeypatch.setattr(build, "cpu_features", lambda: "flags : sse4_2 avx fma bmi2 f16c")
    with pytest.raises(ValueError, match="cpu_isa='avx2': this processor lacks avx2"):
        build.choose_instruction_set("avx2")
