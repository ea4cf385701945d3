"""The checks of `quire doctor`, one by one, and the table of their findings."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.checks import folders, memory, network, processor, software, system, threads
from quire.cli.checks.examination import examine
from quire.cli.checks.finding import Finding, Level, memory_text, note, ok, problem
from quire.cli.checks.table import Table
from quire.ops.cpu import build
from quire.ops.cpu.build import find_compiler
from quire.platform.extras import install_command
from support.waiting import LONGEST, eventually

# ---- checks that go wrong


def _well() -> Iterator[Finding]:
    yield ok("well")


def _raises() -> Iterator[Finding]:
    yield ok("first")
    raise KeyError("x")


def _crashes() -> Iterator[Finding]:
    yield ok("before")
    faulthandler.disable()  # which pytest has switched on
    os.write(2, b"terminate called after throwing\n")
    ctypes.string_at(0)


def _is_killed() -> Iterator[Finding]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield ok("never")


def _exits() -> Iterator[Finding]:
    os._exit(3)
    yield ok("never")


def _hangs() -> Iterator[Finding]:
    subprocess.run(["sleep", "987"])
    yield ok("never")


def test_a_check_that_goes_wrong_in_any_way_is_a_finding_and_the_next_ones_run():
    checks = {"a": _well, "b": _raises, "c": _crashes, "d": _is_killed, "e": _exits, "f": _hangs, "g": _well}
    for seconds in (1.0, 5.0, 25.0, 125.0):  # one is enough for all but f on a machine of any speed
        found = list(examine(checks, seconds))
        if [finding.found for _, finding in found].count("the check failed: it did not end in time") == 1:
            break
    assert [name for name, _ in found] == ["a", "b", "b", "c", "c", "d", "e", "f", "g"]
    texts = [(finding.level, finding.found) for _, finding in found]
    assert texts[0] == texts[-1] == ("ok", "well")
    assert texts[2] == ("note", "could not be found out: KeyError: 'x'")
    crash = "the check failed: its process was ended by SIGSEGV: terminate called after throwing"
    assert texts[4] == ("problem", crash)
    assert texts[5][1].endswith("ended by SIGKILL, probably since memory ran out")
    assert texts[6] == ("problem", "the check failed: its process ended with status 3")
    assert texts[7] == ("problem", "the check failed: it did not end in time")


def test_what_a_check_has_started_is_ended_with_it():
    def starts() -> Iterator[Finding]:
        with subprocess.Popen(["sleep", "987"]) as process:
            yield ok(str(process.pid))
            process.wait()

    found = examine({"starts": starts}, seconds=LONGEST)
    _, finding = next(found)
    started = psutil.Process(int(finding.found))
    found.close()
    eventually(lambda: not started.is_running() or started.status() == psutil.STATUS_ZOMBIE, "its end")


def test_what_a_check_prints_does_not_reach_the_table(capfd):
    def prints() -> Iterator[Finding]:
        os.write(1, b"noise\n")
        os.write(2, b"more noise\n")
        yield ok("quiet")

    assert list(examine({"prints": prints})) == [("prints", ok("quiet"))]
    assert capfd.readouterr() == ("", "")


def test_if_no_process_can_be_started_that_is_the_only_finding():
    code = (
        "from quire.cli.checks.examination import examine\n"
        "import os\n"
        "def refuse():\n    raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "os.fork = refuse\n"
        "for name, finding in examine({'a': None, 'b': None}): print(name, *finding)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("a problem no process can be started")
    assert "ulimit -u" in line


# ---- the table


def lines(finding: Finding, columns: int | None, coloured: bool = False) -> list[str]:
    return Table(["a name", "b"], columns, coloured).lines("b", finding)


def test_a_line_has_level_name_and_text_and_the_advice_is_below_the_text():
    assert lines(ok("fine"), None) == ["ok       b       fine"]
    long = " ".join(["bad"] * 50)
    assert lines(problem(long, "do this"), None) == [f"problem  b       {long}", " " * 17 + "-> do this"]


def test_lines_are_wrapped_to_the_terminal():
    assert lines(note("one two three four five six seven", "eight nine ten eleven twelve thirteen"), 48) == [
        "note     b       one two three four five six",
        "                 seven",
        "                 -> eight nine ten eleven",
        "                    twelve thirteen",
    ]


def test_on_a_narrow_terminal_texts_begin_on_their_own_line():
    assert lines(note("one two three four five six", "seven"), 24) == [
        "note     b",
        "  one two three four",
        "  five six",
        "  -> seven",
    ]


def test_only_the_level_is_coloured():
    assert lines(ok("fine"), 80, True) == ["\x1b[32mok     \x1b[0m  b       fine"]
    assert lines(note("so", "do"), 80, True)[0].startswith("\x1b[33mnote   \x1b[0m  b")
    assert lines(problem("so", "do"), 80, True)[0].startswith("\x1b[1;31mproblem\x1b[0m  b")


def test_texts_of_others_cannot_control_the_terminal():
    (line,) = lines(ok("a\x1b[2J\udcff\nb\tc"), None)
    assert line == "ok       b       a\\x1b[2J\\udcff b c"


@given(st.text("ab c/\n", max_size=200), st.text("ab c/", max_size=99), st.integers(1, 150))
def test_no_line_is_too_long_but_for_a_single_word_and_no_word_is_lost(found, advice, columns):
    written = lines(note(found, advice), columns)
    for line in written[1:]:
        assert len(line) < columns or len(line.replace("->", "").split()) <= 1 or columns < 20
    assert " ".join(written).replace("->", "").split()[2:] == [*found.split(), *advice.split()]


def test_sizes_are_written_for_people():
    assert [memory_text(n) for n in (0, 300 << 20, 3 << 29)] == ["0 MiB", "300 MiB", "1.5 GiB"]


# ---- single checks


def only(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_packages_are_compared_with_what_the_metadata_asks_for(monkeypatch):
    versions = {"numpy": "1.20.0", "fastapi": None, "aiohttp": "1.0"}
    installed = software._installed
    monkeypatch.setattr(software, "_installed", lambda name: versions.get(name, installed(name)))
    finding = only(software.check_packages())
    assert finding.level == "problem"
    assert "numpy 1.20.0 is installed, but Quire needs <3,>=1.26" in finding.found
    assert "fastapi is not installed" in finding.found
    assert '"numpy<3,>=1.26"' in finding.advice
    wrong = [finding.advice for finding in software.check_extras() if finding.level == "note"]
    assert install_command("route") in wrong


@pytest.mark.parametrize(
    ("variables", "level", "text"),
    [
        ({"HF_TOKEN": "hf_secret"}, "ok", "HF_TOKEN has a token"),
        ({"HF_TOKEN": "/etc/hostname"}, "problem", "HF_TOKEN is the path of a file"),
        ({"HF_TOKEN": "hf_secret of mine"}, "problem", "HF_TOKEN is no token"),
    ],
)
def test_the_hubs_token_is_checked_and_never_shown(monkeypatch, variables, level, text):
    for name in network._TOKENS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    finding = next(network.check_hub())
    assert (finding.level, finding.found) == (level, text)
    assert "secret" not in finding.found + finding.advice


def test_a_token_file_that_cannot_be_read_is_a_problem(monkeypatch, tmp_path):
    for name in network._TOKENS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path))  # a folder
    assert next(network.check_hub()).level == "problem"
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert next(network.check_hub()).found.startswith("no token")


def test_proxies_are_shown_without_passwords(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    assert only(network.check_proxies()).found == "none are set"
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")
    finding = only(network.check_proxies())
    assert finding.level == "note"
    assert "https: proxy:3128" in finding.found
    assert "secret" not in str(finding)
    monkeypatch.setenv("no_proxy", "example.org, localhost")
    assert only(network.check_proxies()).level == "ok"


def test_a_port_in_use_is_a_note():
    with socket.socket() as listening:
        with contextlib.suppress(OSError):  # another program has it
            listening.bind(("127.0.0.1", 8000))
            listening.listen()
        finding = only(network.check_port())
    assert finding.level == "note"
    assert "127.0.0.1:8000" in finding.found


@pytest.mark.skipif(find_compiler() is None, reason="no compiler here")
def test_kernels_that_are_not_compiled_yet_or_cannot_be_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert only(processor.check_kernels()).found.startswith("not compiled yet")
    (tmp_path / "quire/kernels").mkdir(parents=True)
    (tmp_path / "quire/kernels").chmod(0o777)
    finding = only(processor.check_kernels())
    assert finding.level == "note"
    assert "anyone may write to it" in finding.found
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert "/proc/nowhere/quire/kernels cannot be written" in only(processor.check_kernels()).found


@pytest.mark.skipif(find_compiler() is None, reason="no compiler here")
def test_kernels_for_a_lesser_processor_are_used_and_are_a_note(monkeypatch, tmp_path):
    """The sources are something that compiles in no time."""
    if not {"avx2", "avx512f"} <= set(build.cpu_features().split()):
        pytest.skip("this processor is a lesser one itself")
    (tmp_path / "one.cpp").write_text('extern "C" void set(int* x) { *x = 42; }')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = build.compile_for("avx2", tmp_path / "quire/kernels")
    monkeypatch.setenv("CXX", "missing-compiler")
    finding = only(processor.check_kernels())
    assert (finding.level, finding.found) == ("note", f"compiled for avx2: {path}; this processor can do more")
    assert only(processor.check_compiler()).level == "ok"


def test_affinity_limits_the_cores():
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("there is only one processor")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        finding = next(threads.check_cores())
    finally:
        os.sched_setaffinity(0, allowed)
    assert finding.found.startswith(f"1 of {os.cpu_count()} processors may be used, limited by the affinity")


def test_cores_of_several_nodes_are_a_note(monkeypatch, tmp_path):
    processors = sorted(os.sched_getaffinity(0))
    for number, listed in (("node0", f"{processors[0]}"), ("node1", f"{processors[-1]}-9999"), ("node2", "5000-5001")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "cpulist").write_text(f"{listed}\n")
    monkeypatch.setattr(threads, "_NODES", tmp_path)
    notes = [finding for finding in threads.check_cores() if "NUMA" in finding.found]
    assert [finding.found.split(" NUMA")[0] for finding in notes] == ["they belong to 2"]
    assert "--cpunodebind=0" in notes[0].advice


@pytest.mark.parametrize(
    ("variable", "count", "allowed", "level"),
    [
        (None, 8, 8, "ok"),
        ("7", 7, 8, "ok"),
        ("2", 2, 8, "note"),
        ("16", 16, 8, "problem"),
        ("16", 8, 8, "note"),
        ("many", 8, 8, "note"),
        ("", 8, 8, "note"),
        ("", 8, 2, "problem"),
        ("8,4", 8, 8, "ok"),
    ],
)
def test_omp_num_threads_that_is_set_oddly(monkeypatch, variable, count, allowed, level):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(threads, "num_threads", lambda: count)
    monkeypatch.setattr(threads.limits, "processors", lambda: allowed)
    assert only(threads.check_threads()).level == level


@pytest.mark.slow
def test_an_engine_in_a_process_starts_as_many_threads_as_it_says():
    code = (
        "from quire.cli.checks.engine import num_threads; import torch; print(num_threads(), torch.get_num_threads())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_little_memory_and_what_is_swapped_out(monkeypatch):
    monkeypatch.setattr(memory.limits, "free_on_host", lambda: 200 << 20)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=5 << 30))
    low, swapped, *_ = memory.check_memory()
    assert (low.level, low.found.split(" free")[0]) == ("problem", "200 MiB")
    assert (swapped.level, swapped.found.split(" of")[0]) == ("note", "5.0 GiB")
    with pytest.raises(OSError, match="too little memory"):
        only(memory.check_bandwidth())


def test_the_systems_settings_are_read_from_their_files(monkeypatch, tmp_path):
    (tmp_path / "thp").write_text("always madvise [never]\n")
    monkeypatch.setattr(memory, "_HUGE_PAGES", tmp_path / "thp")
    assert only(memory.check_huge_pages()).level == "note"
    (tmp_path / "somaxconn").write_text("128\n")
    monkeypatch.setattr(system, "_SOMAXCONN", tmp_path / "somaxconn")
    assert only(system.check_connections()).level == "note"
    (tmp_path / "overcommit").write_text("2\n")
    monkeypatch.setattr(memory, "_OVERCOMMIT", tmp_path / "overcommit")
    assert any("vm.overcommit_memory" in finding.found for finding in memory.check_memory())


def test_core_dumps_are_a_note_only_where_they_become_files(monkeypatch, tmp_path):
    (tmp_path / "pattern").write_text("core\n")
    monkeypatch.setattr(system, "_CORE_PATTERN", tmp_path / "pattern")
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        pytest.skip("core dumps cannot be switched on here")
    resource.setrlimit(resource.RLIMIT_CORE, (1, hard))
    try:
        assert only(system.check_core_dumps()).level == "note"
        (tmp_path / "pattern").write_text("|/usr/lib/systemd/systemd-coredump %P\n")
        assert "/usr/lib/systemd/systemd-coredump" in only(system.check_core_dumps()).found
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        assert only(system.check_core_dumps()) == ok("off")
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_a_clock_that_is_behind_is_a_problem(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 86_400.0)
    finding = only(system.check_clock())
    assert finding.level == "problem"
    assert "1970-01-02 00:00 UTC" in finding.found


def test_a_folder_that_is_missing_counts_as_writable_if_it_can_be_made(tmp_path):
    assert folders.why_not_writable(tmp_path / "a" / "b") is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    assert folders.why_not_writable(tmp_path / "file" / "below") == "Not a directory"
    assert folders.why_not_writable(Path("/proc/nowhere")) is not None


@pytest.mark.parametrize(
    ("kind", "level", "text"),
    [
        ("nfs4", "note", "over the network"),
        ("fuse.sshfs", "note", "over the network"),
        ("overlay", "note", "in the container's own layer"),
        ("tmpfs", "note", "in memory"),
        ("xfs", "ok", "on disk (xfs)"),
    ],
)
def test_where_the_hubs_cache_lies(monkeypatch, tmp_path, kind, level, text):
    parts = [("/", "ext4", "root"), (str(tmp_path), "ext4", "hidden"), (str(tmp_path), kind, "disk")]
    mounted = [SimpleNamespace(mountpoint=m, fstype=f, device=d) for m, f, d in parts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounted)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(folders, "_LITTLE", 0)
    finding = only(folders.check_hub_cache())
    assert finding.level == level
    assert text in finding.found


def test_levels_are_the_words_of_the_table():
    assert [*map(str, Level)] == ["ok", "note", "problem"]
