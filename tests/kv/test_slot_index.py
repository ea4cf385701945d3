"""The index of a memory tier's slots: what one core has stored, the next one of the same model finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kv.hashing import hash_root
from quire.kv.tiers import SlotIndex

ROOT = hash_root("a model")
FIRST, SECOND = (0, b"f" * 32), (1, b"s" * 32)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(bytes(5 * SlotIndex.RECORD.size))
    return path


def test_the_next_core_finds_the_slots_in_the_order_in_which_they_were_written(memory: Path) -> None:
    index = SlotIndex(memory, 4, ROOT)
    assert list(index.read()) == []
    index.write(3, FIRST)
    index.write(0, SECOND)
    again = SlotIndex(memory, 4, ROOT)
    assert list(again.read()) == [(FIRST, 3), (SECOND, 0)]
    again.erase(3)
    again.write(1, FIRST)
    assert list(SlotIndex(memory, 4, ROOT).read()) == [(SECOND, 0), (FIRST, 1)]


def test_what_was_stored_for_another_model_is_forgotten(memory: Path) -> None:
    SlotIndex(memory, 4, ROOT).write(2, FIRST)
    other = SlotIndex(memory, 4, hash_root("another model"))
    assert list(other.read()) == []
    assert list(SlotIndex(memory, 4, ROOT).read()) == []
