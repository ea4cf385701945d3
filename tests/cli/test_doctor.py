"""`quire doctor`, as a process on real and on limited machines."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.ops.cpu.build import find_compiler, library
from support.container import can_unshare, container
from support.stand_in import run_on_stand_in
from support.terminal import terminal
from support.waiting import LONGEST

CHECKS = (
    "Python, PyTorch, packages, extras, processor, C++ compiler, CPU kernels, cores, threads, memory, huge pages, "
    "memory bandwidth, machine profile, GPU, open files, processes, locked memory, core dumps, shared memory, "
    "connections, clock, Quire's cache, Quire's state, hub's cache, temporary files, hub, proxies, port"
).split(", ")
ESCAPE = "\x1b"


def doctor(
    *arguments: str, wrapper: list[str] | None = None, limit: Callable[[], None] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """limit: called in the process before it begins."""
    return subprocess.run(
        [*(wrapper or []), sys.executable, "-m", "quire", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
        preexec_fn=limit,
        env={**os.environ, **environment},
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, Any]]]:
    """The findings by their checks, from what `--json` printed."""
    assert done.stderr == ""
    result: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        result.setdefault(finding["check"], []).append(finding)
    return result


def limit(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


@pytest.fixture(scope="module")
def report() -> subprocess.CompletedProcess[str]:
    """Of this machine."""
    return doctor("--json")


def test_every_check_finds_something_on_this_machine(report):
    found = findings(report)
    assert [name for name in found if name != "Triton"] == [*CHECKS]
    texts = [finding["found"] for of_check in found.values() for finding in of_check]
    assert not [text for text in texts if "could not be found out" in text or "the check failed" in text]
    assert all(finding["advice"] for of_check in found.values() for finding in of_check if finding["level"] != "ok")


def test_the_exit_status_says_whether_there_are_problems_and_the_totals_count_them(report):
    totals = json.loads(report.stdout)
    levels = [finding["level"] for finding in totals["findings"]]
    assert (totals["ok"], totals["notes"], totals["problems"]) == tuple(map(levels.count, ("ok", "note", "problem")))
    assert report.returncode == (totals["problems"] > 0)


def test_what_it_finds_is_what_quire_uses(report):
    import psutil
    import torch

    found = {name: of_check[0]["found"] for name, of_check in findings(report).items()}
    assert found["PyTorch"].startswith(torch.__version__)
    assert f"{psutil.virtual_memory().total / 2**30:.1f} GiB" in found["memory"]
    assert float(re.match(r"([\d.]+) GB/s, by", found["memory bandwidth"])[1]) > 0.1
    if find_compiler() is not None:
        assert found["C++ compiler"].startswith(find_compiler()[0])
    if library() is not None:
        assert found["CPU kernels"].endswith(str(library().path)) or "in the background" in found["CPU kernels"]


@pytest.mark.slow
def test_a_pipe_gets_one_line_for_each_text_and_no_colours():
    done = doctor(limit=limit(resource.RLIMIT_NOFILE, 64), CXX="missing-compiler", XDG_CACHE_HOME="/proc/nowhere")
    assert done.returncode == 1
    assert done.stderr == ""
    assert ESCAPE not in done.stdout
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith("Quire ")
    assert re.fullmatch(r"\d+ problems?, (no|\d+) notes?", last)
    indent = " " * len("problem  memory bandwidth  ")
    assert all(re.match(r"(ok|note|problem) +\S|" + indent + "-> ", line) for line in lines)
    for line, advice in (
        ("problem  C++ compiler      'missing-compiler', which CXX names, is missing", "Install g++ 12"),
        ("problem  CPU kernels       not compiled, and there is no compiler", "quire compile --cpu"),
        ("problem  open files        at most 64", "Raise the hard limit: ulimit -Hn"),
        ("note     Quire's cache     /proc/nowhere/quire cannot be written", "Set XDG_CACHE_HOME"),
    ):
        (index,) = (index for index, text in enumerate(lines) if text.startswith(line))
        assert advice in lines[index + 1]


def test_where_pytorch_cannot_be_loaded_that_is_the_problem_and_the_other_checks_run():
    done = doctor("--json", limit=limit(resource.RLIMIT_AS, 300 << 20))
    found = findings(done)
    assert done.returncode == 1
    assert set(CHECKS) <= set(found)
    (torch,) = found["PyTorch"]
    assert torch["level"] == "problem"
    assert "cannot be imported" in torch["found"]
    assert "ulimit -v" in torch["advice"]
    assert any("addresses (ulimit -v)" in finding["found"] for finding in found["memory"])
    assert found["CPU kernels"][0]["found"].endswith("PyTorch cannot be imported")
    assert found["port"][0]["level"] in ("ok", "note")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="making a read-only root needs root, unshare and setpriv")
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_user_without_home_privileges_and_a_writable_folder(shared_memory):
    done = doctor("--json", wrapper=container(shared_memory))
    found = findings(done)
    assert done.returncode == 1
    assert set(CHECKS) <= set(found)
    assert [found[name][0]["level"] for name in ("C++ compiler", "CPU kernels", "open files")] == ["problem"] * 3
    for name in ("Quire's cache", "Quire's state", "hub's cache"):
        assert "this user has no home folder" in found[name][0]["found"]
    (temporary,) = found["temporary files"]
    assert temporary["level"] == ("ok" if shared_memory else "problem")


@pytest.mark.nightly
@pytest.mark.skipif(not can_unshare(), reason="making a read-only root needs root, unshare and setpriv")
@pytest.mark.skipif(library() is None, reason="no compiler here")
def test_kernels_that_an_image_brings_need_no_compiler_and_no_writable_folder():
    with tempfile.TemporaryDirectory() as image:
        Path(image).chmod(0o755)
        shutil.copytree(library().path.parent, Path(image, "quire/kernels"))
        found = findings(doctor("--json", wrapper=container(XDG_CACHE_HOME=image)))
    assert found["CPU kernels"][0]["found"].startswith("compiled for ")
    assert found["C++ compiler"][0] == {
        "check": "C++ compiler",
        "level": "ok",
        "found": "none was found, and none is needed: the kernels are compiled",
        "advice": "",
    }
    assert found["Quire's cache"][0]["level"] == "note"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("columns", [100, 44])
def test_on_a_terminal_lines_fit_and_levels_are_coloured(tmp_path, columns):
    with terminal("doctor", state=tmp_path, columns=columns) as session:
        status = session.end()
    lines = re.sub(r"\x1b\[[\d;]*m", "", session.screen).splitlines()
    assert f"{ESCAPE}[32mok     {ESCAPE}[0m  Python" in session.screen
    long = [line for line in lines if len(line) > columns]
    paths = [line.replace("->", "").split("  ")[-1] for line in long]  # behind the level and the name of the check
    assert all(" " not in path.strip() for path in paths), long  # a path stays whole
    assert "hub's cache" in session.screen
    assert status == (not lines[-1].startswith("no problems"))


@pytest.mark.nightly
def test_a_compiler_that_fails_is_told_with_its_first_error(tmp_path):
    compiler = tmp_path / "old-compiler"
    compiler.write_text("#!/bin/sh\necho 'probe.cpp:7:7: error: no shuffle here' >&2\nexit 1\n")
    compiler.chmod(0o755)
    (finding,) = findings(doctor("--json", CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path)))["C++ compiler"]
    assert finding["level"] == "problem"
    assert "cannot compile the CPU kernels: probe.cpp:7:7: error: no shuffle here" in finding["found"]


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("card", ["sm_90", "gfx942"])
def test_gpus_are_listed_with_what_they_have_free(card):
    pytest.importorskip("triton")
    printed = run_on_stand_in(
        """
        from quire.cli.checks.gpu import check_gpus, check_triton
        for finding in [*check_gpus(), *check_triton()]:
            print(*finding, sep="|")
        """,
        card,
    )
    gpu, triton = printed.splitlines()
    assert re.match(r"ok\|0: (NVIDIA H100, compute capability 9.0|AMD MI300X, gfx942), .* GiB free", gpu)
    assert triton.startswith("ok|3.")


def test_help_names_the_options():
    done = subprocess.run([sys.executable, "-m", "quire", "doctor", "--help"], capture_output=True, text=True)
    assert "--json" in done.stdout
    assert "reports problems with their solutions" in " ".join(done.stdout.split())
