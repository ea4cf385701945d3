"""Arrays of a vocabulary are computed once, and later starts read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.text import kept_arrays
from quire.text.kept_arrays import Integers
from quire.text.partial_backend import ListedMerges
from quire.text.strings import Strings

SOURCES = [np.arange(5, dtype=np.uint8), np.arange(7)]


class Counter:
    """Computes arrays, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> list[Integers]:
        self.count += 1
        return [np.arange(4), np.empty(0, np.int64), np.arange(3) - 9]

    def get(self, name: str = "numbers", sources: object = SOURCES) -> list[list[int]]:
        found = kept_arrays.kept_arrays(name, sources, (4, 0, 3), self)  # type: ignore[arg-type]
        return [array.tolist() for array in found]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire" / "vocabularies"


def test_later_starts_read_them(folder: Path) -> None:
    make = Counter()
    assert make.get() == make.get() == [[0, 1, 2, 3], [], [-9, -8, -7]]
    assert make.count == 1
    assert len([*folder.iterdir()]) == 1


def test_other_sources_and_other_computations_have_their_own(folder: Path) -> None:
    make = Counter()
    make.get()
    make.get(name="others")
    make.get(sources=SOURCES[:1])
    make.get(sources=[SOURCES[0], SOURCES[1] + 1])
    assert make.count == 4


@pytest.mark.parametrize("damage", ["changed", "cut", "longer", "empty"])
def test_damaged_files_are_made_anew(folder: Path, damage: str) -> None:
    make = Counter()
    expected = make.get()
    [file] = folder.iterdir()
    content = file.read_bytes()
    changed = content[:20] + bytes([content[20] ^ 1]) + content[21:]
    damaged = {"changed": changed, "cut": content[:-8], "longer": content + bytes(8), "empty": b""}
    file.write_bytes(damaged[damage])
    assert make.get() == expected
    assert make.count == 2
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_used_is_no_problem(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    make = Counter()
    assert make.get() == make.get()
    assert make.count == 2


def test_wrong_merges_are_found_at_each_start(folder: Path) -> None:
    tokens = Strings.of(["a", "b", "ab"])
    for _ in range(2):
        with pytest.raises(ValueError, match="is no token"):
            ListedMerges(tokens, Strings.of(["a b", "b a"]))
    assert not folder.exists()
    for _ in range(2):
        assert ListedMerges(tokens, Strings.of(["a b"])).into(np.array([2, 0])) == [("a", "b")]
    assert len([*folder.iterdir()]) == 1
