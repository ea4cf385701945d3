"""Stages of .ci/run: their times, their limits, and the end of what they start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

STAGE = Path(__file__).parents[2] / ".ci/stage.py"
COMPUTE = """
import subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], check=True)
while time.process_time() < 0.4: pass
"""
# The first process below the command ignores signals and has its own session, the second one belongs to it.
LEAVE = """
import os, subprocess, sys, time
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True, stdout=subprocess.PIPE)
    print(child.pid, child.stdout.readline().decode(), flush=True)
    if os.environ["WAITS"]: time.sleep(1000)
else:
    import signal
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "stages.tsv"


def start(table: Path, limit: float, *command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(STAGE), str(table), "a stage", str(limit), *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def script(folder: Path, text: str) -> list[str]:
    (folder / "script.py").write_text(text)
    return [sys.executable, str(folder / "script.py")]


@pytest.mark.slow
def test_a_table_has_the_processor_time_of_all_processes(table: Path, tmp_path: Path):
    assert start(table, 1000, *script(tmp_path, COMPUTE)).wait() == 0
    assert start(table, 1000, sys.executable, "-c", "raise SystemExit(3)").wait() == 3
    (_, processor, *rest), failed = (line.split("\t") for line in table.read_text().splitlines())
    assert float(processor) > 0.8
    assert rest == ["1000.0", "passed", "a stage"]
    assert failed[2:] == ["1000.0", "failed", "a stage"]
    shown = subprocess.run([sys.executable, str(STAGE), str(table)], capture_output=True, text=True, check=True).stdout
    assert re.search(r"^ +\d+ +\d+ +1000  passed        a stage$", shown, re.MULTILINE)
    assert re.search(r"^ +\d+ +\d+ +in total$", shown, re.MULTILINE)


def test_a_stage_that_is_too_slow_is_ended_with_all_that_it_has_started(table: Path, tmp_path: Path):
    stage = start(table, 2.0, *script(tmp_path, LEAVE), WAITS="yes")
    output, _ = stage.communicate()
    assert stage.returncode == 124
    assert "The stage 'a stage' has run longer than its limit of 2 s." in output
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path / "script.py") in command for command in commands)
    assert table.read_text().split("\t")[3] == "ran too long"


def test_all_stages_have_a_limit_together(table: Path):
    stage = start(table, 1000, "sleep", "1000", STAGES_END=str(time.time() + 1))
    output, _ = stage.communicate()
    assert stage.returncode == 124
    assert re.search(r"longer than the [01] s left for all stages", output)


def test_processes_that_a_stage_has_left_are_killed(table: Path, tmp_path: Path):
    stage = start(table, 1000, *script(tmp_path, LEAVE), WAITS="")
    output, _ = stage.communicate()
    assert stage.returncode == 0
    check_killed(output)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_stage_ends_its_command(table: Path, tmp_path: Path, number: signal.Signals):
    stage = start(table, 1000, *script(tmp_path, LEAVE), WAITS="yes")
    output = "".join(stage.stdout.readline() for _ in range(3))
    stage.send_signal(number)
    output += stage.communicate()[0]
    assert stage.returncode == 130
    check_killed(output)


def check_killed(output: str) -> None:
    pids = [int(number) for number in re.findall(r"^\d+|(?<= )\d+$", output, re.MULTILINE)[:2]]
    assert len(pids) == 2
    assert "It left running, and is killed: sleep 1000" in output
    assert not any(map(psutil.pid_exists, pids))
