"""Writable folders: where they are found, and that nobody else can enter them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from quire.checkpoints.errors import ModelNotFoundError
from quire.checkpoints.hub import resolve
from quire.platform import folders


@pytest.fixture
def no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only root without a tmpfs."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/tmp"])


def test_only_this_user_can_enter_a_private_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = folders.private_folder("quire-")
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("base", [None, "", "relative", "/somewhere"])
def test_the_folders_of_a_user_are_the_same_without_platformdirs(monkeypatch, tmp_path, base):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        if base is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, base)
    expected = folders.cache_folder(), folders.state_folder()
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert (folders.cache_folder(), folders.state_folder()) == expected
    assert expected[0] == (Path("/somewhere/quire") if base == "/somewhere" else tmp_path / ".cache" / "quire")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_on_a_read_only_root_shared_memory_serves(no_temporary_folder):
    folder = folders.private_folder("quire-")
    folder.rmdir()
    assert folder.parent == Path("/dev/shm")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_a_folder_for_sockets_has_a_path_that_fits_an_address(monkeypatch, tmp_path):
    deep = tmp_path / "deep" / ("x" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = folders.private_folder("quire-", longest=99)
    folder.rmdir()
    assert len(str(folder)) <= 99


def test_where_no_folder_can_be_written_the_error_says_what_to_set(no_temporary_folder, monkeypatch):
    monkeypatch.setattr(folders, "_SHARED_MEMORY", "/proc/shm")
    with pytest.raises(OSError, match="TMPDIR"):
        folders.private_folder("quire-")


def test_a_user_without_a_home_has_no_folders_in_it(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user who is not in /etc/passwd
    assert folders.cache_folder() is None
    assert folders.state_folder() is None
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "platformdirs", None)
        assert folders.cache_folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert folders.cache_folder() == Path("/somewhere/quire")
    with pytest.raises(ModelNotFoundError, match="'~/model': no such file"):
        resolve("~/model")
