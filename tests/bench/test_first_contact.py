"""The script of the first minutes on a GPU: what stops what, how long a section may take, and which files come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import eventually

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def contact(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    import first_contact

    return first_contact


def sections_in(code: str) -> list[str]:
    """A command to which the name of a section is appended; the code finds it as `name`."""
    return [sys.executable, "-c", f"import json, sys, time, os, subprocess\nname = sys.argv[-1]\n{code}"]


def test_what_depends_on_a_section_that_failed_is_skipped(contact, tmp_path):
    chain = [
        contact.Section("start", 20),
        contact.Section("right", 20, ("start",)),
        contact.Section("wrong", 20, ("start",)),
        contact.Section("after wrong", 20, ("wrong",)),
        contact.Section("last", 20, ("after wrong",)),
    ]
    command = sections_in("print('noise'); print(json.dumps({'failures': {'a': 'b'} if name == 'wrong' else {}}))")
    results = contact.run(chain, command, tmp_path / "results.json", 100)
    assert [contact.is_failed(result) for result in results.values()] == [False, False, True, True, True]
    assert results["after wrong"] == {"skipped": "wrong failed"}
    assert json.loads((tmp_path / "results.json").read_text()) == results
    shown = contact.report(results)
    assert "| last |  | after wrong failed |" in shown
    assert "wrong: a: b" in shown


def has_ended(process: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_section_that_takes_too_long_is_ended_with_its_processes_and_keeps_its_results(contact, tmp_path):
    marker = tmp_path / "child"
    command = sections_in(f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(marker)!r}, "w").write(str(child.pid))
print(json.dumps({{"so far": 1}}), flush=True)
time.sleep(600)
""")
    result = contact.run_section([*command, "slow"], 5)
    assert result["so far"] == 1
    assert result["error"] == "took more than 5 s"
    eventually(lambda: has_ended(int(marker.read_text())))  # the system may end it a moment later


def test_a_section_whose_process_dies_is_an_error_and_without_time_none_starts(contact, tmp_path):
    assert contact.run_section([*sections_in("os._exit(3)"), "dies"], 20)["error"] == "ended with exit code 3"
    results = contact.run([contact.Section("late", 5)], ["false"], tmp_path / "results.json", 10)
    assert results["late"] == {"skipped": "no time was left"}


def test_the_sections_fit_into_the_time_of_a_command(contact):
    names = [section.name for section in contact.SECTIONS]
    assert all(names.index(need) < names.index(section.name) for section in contact.SECTIONS for need in section.needs)
    assert contact.SECONDS + contact.RESERVED < 560
    assert sum(section.seconds for section in contact.SECTIONS) < 600 + 60  # limits, not expected times


def test_only_as_many_and_as_large_files_remain_as_come_back(contact, tmp_path, monkeypatch):
    monkeypatch.setattr(contact, "FILE_BYTES", 1000)
    for i in range(9):
        (tmp_path / f"file{i}").write_bytes(b"x" * i)
    (tmp_path / "large").write_bytes(b"x" * 1001)
    lines = contact.check_files(tmp_path)
    assert [line.split(" ")[1] for line in lines] == ["large,", "file8,"]
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.slow
def test_the_script_starts_on_a_stand_in_and_leaves_its_files(tmp_path):
    pytest.importorskip("triton")
    command = [str(GPU / "first_contact.sh"), str(tmp_path), "--stand-in", "sm_90", "--only", "start", "graphs"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    results = json.loads((tmp_path / "first-contact.json").read_text())
    assert results["start"]["device"] == "NVIDIA H100"
    assert results["graphs"]["passed"] == 1
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {"first-contact.json", "log.txt", "triton-cache.tar.xz"}
    assert "| graphs |" in (tmp_path / "log.txt").read_text()
