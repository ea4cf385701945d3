"""The folder of compiled GPU kernels: it can be moved, and it can be read-only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")
from quire.ops.triton.cache import KernelCache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def test_kernels_are_found_after_their_folder_was_moved(folder: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = KernelCache("key")
    kernel.put_group("kernel.json", {"kernel.json": kernel.put("{}", "kernel.json")})
    shutil.move(folder / "triton", folder / "moved")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "moved"))
    assert KernelCache("key").get_group("kernel.json") == {"kernel.json": str(folder / "moved" / "key" / "kernel.json")}
    (folder / "moved" / "key" / "kernel.json").unlink()
    assert KernelCache("key").get_group("kernel.json") is None


def test_kernels_that_cannot_be_written_are_kept_for_the_process(folder: Path):
    (folder / "triton").write_text("no folder can be made below a file")  # as root, permissions would refuse nothing
    path = Path(KernelCache("new").put(b"new code", "kernel.cubin"))
    assert path.read_bytes() == b"new code"
    assert folder not in path.parents
    assert KernelCache("new").get_file("kernel.cubin") == str(path)


def test_a_damaged_group_is_compiled_again(folder: Path):
    KernelCache("key").put("{", "__grp__kernel.json")
    assert KernelCache("key").get_group("kernel.json") is None
