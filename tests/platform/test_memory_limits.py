"""The limits of cgroups, read from folders that are laid out like those of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.platform import limits

GB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
UNLIMITED_V1 = 9223372036854771712


def v1(controllers: str, top: str = "/") -> str:
    return f"35 31 0:32 {top} /sys/fs/cgroup/{controllers} rw,relatime shared:9 - cgroup cgroup rw,{controllers}"


def machine(root: Path, mounts: list[str], membership: str, files: dict[str, object]) -> Path:
    """A root with what /proc says of this process, and files of cgroups below /sys/fs/cgroup."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    unrelated = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard"
    (proc / "mountinfo").write_text("\n".join([unrelated, *mounts]) + "\n")
    (proc / "cgroup").write_text(membership)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_version_2_what_the_limit_leaves_and_the_page_cache_that_can_be_given_back_are_free(tmp_path):
    root = machine(
        tmp_path,
        [V2],
        "0::/a/b\n",
        {"a/b/memory.max": 4 * GB, "a/b/memory.current": 3 * GB, "a/b/memory.stat": f"anon 7\ninactive_file {GB // 2}"},
    )
    assert limits.free_memory(root) == 1.5 * GB


@pytest.mark.parametrize(
    ("inactive", "active", "used"), [(GB, 0, 2 * GB), (0, GB, 2 * GB), (GB // 2, GB // 2, 2 * GB), (0, 0, GB)]
)
def test_files_that_must_stay_in_the_page_cache_are_not_free_however_they_count(tmp_path, inactive, active, used):
    """A process of 1 GB has mapped 1 GB: as pages that were used lately, or not, or those of other cgroups."""
    stat = f"inactive_file {inactive}\nactive_file {active}"
    files = {"memory.max": 4 * GB, "memory.current": used, "memory.stat": stat}
    assert limits.free_memory(machine(tmp_path, [V2], "0::/\n", files), mapped=GB) == 2 * GB


def test_version_2_the_tightest_of_a_process_s_cgroup_and_its_ancestors_counts(tmp_path):
    root = machine(
        tmp_path,
        [V2],
        "0::/a/b/c\n",
        {
            "a/memory.max": 8 * GB,
            "a/memory.current": 7 * GB,
            "a/b/memory.max": "max",
            "a/b/memory.current": GB,
            "a/b/c/memory.max": 4 * GB,
            "a/b/c/memory.current": GB,
        },
    )
    assert limits.free_memory(root) == GB


def test_version_2_memory_high_is_a_limit_too(tmp_path):
    files = {"memory.max": 4 * GB, "memory.high": 2 * GB, "memory.current": GB}
    assert limits.free_memory(machine(tmp_path, [V2], "0::/\n", files)) == GB


def test_inside_a_container_the_root_of_the_mount_is_its_cgroup(tmp_path):
    files = {"memory.max": 2 * GB, "memory.current": GB, "cpu.max": "100000 100000"}
    root = machine(tmp_path, [V2], "0::/\n", files)
    assert limits.free_memory(root) == GB
    assert limits.processors(root) == 1


@pytest.mark.parametrize("path", ["/../../elsewhere", "/not/mounted/here"])
def test_a_cgroup_outside_of_what_is_mounted_is_looked_up_at_the_root_of_the_mount(tmp_path, path):
    files = {"memory.max": 2 * GB, "memory.current": GB}
    assert limits.free_memory(machine(tmp_path, [V2], f"0::{path}\n", files)) == GB


def test_version_1_knows_ancestors_and_counts_the_page_cache_of_descendants(tmp_path):
    root = machine(
        tmp_path,
        [v1("memory")],
        "4:memory:/docker/x\n0::/\n",
        {
            "memory/memory.limit_in_bytes": UNLIMITED_V1,
            "memory/docker/memory.limit_in_bytes": 3 * GB,
            "memory/docker/memory.usage_in_bytes": 2 * GB,
            "memory/docker/x/memory.limit_in_bytes": 4 * GB,
            "memory/docker/x/memory.usage_in_bytes": 2 * GB,
            "memory/docker/memory.stat": f"inactive_file 0\ntotal_inactive_file {GB // 4}",
        },
    )
    assert limits.free_memory(root) == 1.25 * GB


def test_version_1_inside_a_container_that_sees_its_part_of_the_hierarchy_only(tmp_path):
    mounts = [v1("memory", "/docker/x"), v1("cpu,cpuacct", "/docker/x")]
    root = machine(
        tmp_path,
        mounts,
        "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n",
        {
            "memory/memory.limit_in_bytes": GB,
            "memory/memory.usage_in_bytes": GB // 2,
            "cpu,cpuacct/cpu.cfs_quota_us": 100000,
            "cpu,cpuacct/cpu.cfs_period_us": 100000,
        },
    )
    assert limits.free_memory(root) == GB // 2
    assert limits.processors(root) == 1


def test_both_versions_may_be_mounted_at_once(tmp_path):
    hybrid = V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    files = {
        "unified/cgroup.controllers": "",
        "memory/a/memory.limit_in_bytes": GB,
        "memory/a/memory.usage_in_bytes": 0,
    }
    assert limits.free_memory(machine(tmp_path, [hybrid, v1("memory")], "4:memory:/a\n0::/\n", files)) == GB


def test_usage_beyond_the_limit_leaves_nothing(tmp_path):
    files = {"memory.max": GB, "memory.current": GB + 4096}
    assert limits.free_memory(machine(tmp_path, [V2], "0::/\n", files)) == 0


@pytest.mark.parametrize("files", [{}, {"memory.max": "max"}, {"a/memory.limit_in_bytes": UNLIMITED_V1}])
def test_without_a_limit_the_machine_s_memory_counts(tmp_path, files):
    assert limits.free_memory(machine(tmp_path, [V2], "0::/a\n", files)) is None


def test_without_proc_there_is_no_limit(tmp_path):
    assert limits.free_memory(tmp_path) is None
    assert limits.processors(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("garbage", 8)],
)
def test_version_2_a_quota_is_rounded_down_to_whole_processors(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert limits.processors(machine(tmp_path, [V2], "0::/a\n", {"a/cpu.max": quota})) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 8), (300000, 3), (20000, 1)])
def test_version_1_a_quota_is_rounded_down_to_whole_processors(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    files = {"cpu/a/cpu.cfs_quota_us": quota, "cpu/a/cpu.cfs_period_us": 100000, "cpu/cpu.cfs_quota_us": -1}
    assert limits.processors(machine(tmp_path, [v1("cpu")], "1:cpu:/a\n", files)) == expected


def test_the_quota_of_an_ancestor_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    files = {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}
    assert limits.processors(machine(tmp_path, [V2], "0::/a/b\n", files)) == 2


def test_the_name_of_a_mount_may_have_a_space(tmp_path):
    mount = V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/a\\040b ")
    files = {"a b/memory.max": GB, "a b/memory.current": 0}
    assert limits.free_memory(machine(tmp_path, [mount], "0::/\n", files)) == GB
