"""The profile of a machine is kept in a file that is ignored unless it is whole and of this machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from quire.platform import machine_profile
from quire.platform.machine_profile import (
    age_text,
    can_keep_profile,
    is_better,
    machine_key,
    read_profile,
    write_profile,
)
from support.machine_profiles import MONDAY, profile

KEY = "0" * 32
CPUINFO = "processor\t: 0\nvendor_id\t: A\nmodel name\t: {}\nmicrocode\t: 0x1\n\nprocessor\t: 1\nmodel name\t: other\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine_profile, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "machine"


def test_a_profile_that_was_kept_is_read_back(cache):
    assert read_profile(KEY) is None
    assert write_profile(KEY, profile(4)) is None
    assert read_profile(KEY) == profile(4)
    assert read_profile("1" * 32) is None
    assert [path.name for path in cache.iterdir()] == [f"{KEY}.json"]


def _with_digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:100] + b"9" + data[101:],
        lambda data: data + b" " * (1 << 20),
        lambda data: _with_digest(b"[]"),
        lambda data: _with_digest(b'{"rates":'),
        lambda data: _with_digest(data.partition(b"\n")[2].replace(b'"noise":0.01', b'"noise":-1.0')),
        lambda data: _with_digest(data.partition(b"\n")[2].replace(b'"threads":2', b'"threads":1')),
        lambda data: _with_digest(data.partition(b"\n")[2].replace(b'"threads":2', b'"threads":"2"')),
        lambda data: _with_digest(data.partition(b"\n")[2].replace(b'"share":0.99', b'"share":1e999')),
    ],
)
def test_a_damaged_profile_is_ignored(cache, change):
    write_profile(KEY, profile())
    path = cache / f"{KEY}.json"
    changed = change(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert read_profile(KEY) is None
    write_profile(KEY, profile())
    assert read_profile(KEY) == profile()


def test_a_profile_that_others_may_write_is_ignored(cache):
    write_profile(KEY, profile())
    os.chmod(cache, 0o777)
    assert read_profile(KEY) is None
    os.chmod(cache, 0o700)
    os.chmod(cache / f"{KEY}.json", 0o666)
    assert read_profile(KEY) is None


def test_what_is_no_file_is_ignored(cache):
    cache.mkdir(parents=True)
    os.mkfifo(cache / f"{KEY}.json")
    assert read_profile(KEY) is None


def test_a_folder_that_cannot_be_written_gives_a_reason(cache, monkeypatch):
    cache.parent.write_text("not a folder")
    assert "Not a directory" in str(write_profile(KEY, profile()))
    assert read_profile(KEY) is None
    monkeypatch.setattr(machine_profile, "cache_folder", lambda: None)
    assert write_profile(KEY, profile()) == "this user has no home folder"
    assert read_profile(KEY) is None
    assert not can_keep_profile()


def test_it_is_known_beforehand_whether_a_profile_can_be_kept(cache, monkeypatch):
    assert can_keep_profile()
    assert not cache.exists()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root, every folder can be written
    assert not can_keep_profile()


def key(root: Path, name: str = "X", quota: str = "max 100000", kernels: str = "a") -> str:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/cpuinfo").write_text(CPUINFO.format(name))
    (root / "proc/self/mountinfo").write_text("1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup/cpu.max").write_text(quota)
    return machine_key([kernels, "2.13"], root)


def test_the_key_is_that_of_the_processor_its_limit_and_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    same = key(tmp_path)
    assert same == key(tmp_path)
    others = [key(tmp_path, name="Y"), key(tmp_path, quota="200000 100000"), key(tmp_path, kernels="b")]
    for number in range(4):  # two cores with two threads each
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "core_cpus_list").write_text(f"{number % 2},{number % 2 + 2}\n")
    others.append(key(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    others.append(key(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})  # one core
    others.append(key(tmp_path))
    assert len({same, *others}) == 1 + len(others)


def test_a_system_that_describes_nothing_has_a_key(tmp_path):
    assert len(machine_key([], tmp_path)) == 32


def test_an_old_profile_is_due_and_one_of_a_busy_machine_soon():
    day = 86400
    assert not profile().is_due(MONDAY + 29 * day)
    assert profile().is_due(MONDAY + 31 * day)
    assert profile().is_due(MONDAY - 1)  # the clock was wrong
    busy = profile(noise=0.2)
    assert not busy.is_due(MONDAY + 60)
    assert busy.is_due(MONDAY + day)
    assert age_text(profile()) == "2026-11-30"


def test_a_busy_machine_does_not_replace_what_a_quiet_one_has_measured():
    quiet, noisy, shared = profile(), profile(noise=0.2), profile(share=0.5)
    assert quiet.is_quiet
    assert not noisy.is_quiet
    assert not shared.is_quiet
    assert is_better(noisy, None)
    assert is_better(quiet, noisy)
    assert is_better(noisy, shared)
    assert not is_better(noisy, quiet)
