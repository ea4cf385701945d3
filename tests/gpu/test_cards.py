"""Which card a device is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quire.platform.gpu.cards import CARDS, card_of


@pytest.fixture(autouse=True)
def _forget() -> None:
    card_of.cache_clear()


def properties(capability: int, name: str = "a card", architecture: str = "") -> SimpleNamespace:
    major, minor = divmod(capability, 10)
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=7,
        total_memory=10**9,
        shared_memory_per_block_optin=50_000,
        shared_memory_per_multiprocessor=60_000,
        regs_per_multiprocessor=32_768,
        gcnArchName=architecture or name,
    )


@pytest.mark.parametrize(
    ("capability", "nearest"), [(75, 80), (80, 80), (86, 86), (87, 86), (90, 90), (103, 100), (120, 120), (121, 121)]
)
def test_a_device_is_the_nearest_lower_card_with_its_own_sizes(monkeypatch, capability, nearest):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties(capability))
    card = card_of(torch.device("cuda", 0))
    assert card.capability == nearest
    assert (card.name, card.processors, card.memory) == ("a card", 7, 10**9)
    assert (card.shared_memory, card.processor_memory, card.registers) == (50_000, 60_000, 32_768)
    assert card.warps == CARDS[f"sm_{nearest}"].warps


def test_a_card_of_amd_is_known_by_its_architecture(monkeypatch):
    found = properties(94, architecture="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    card = card_of(torch.device("cuda", 0))
    assert (card.capability, card.backend, card.warp_size, card.processors) == ("gfx942", "hip", 64, 7)


@pytest.mark.parametrize(
    ("architecture", "program", "processor", "wave"),
    [
        ("gfx90a", 64, 64, 64),
        ("gfx942", 64, 64, 64),
        ("gfx950", 160, 160, 64),
        ("gfx1100", 64, 128, 32),
        ("gfx1201", 64, 128, 32),
        ("gfx1310", 64, 64, 64),
    ],
)
def test_architectures_of_amd_have_their_own_limits(monkeypatch, architecture, program, processor, wave):
    found = properties(90, architecture=f"{architecture}:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    card = card_of(torch.device("cuda", 0))
    assert (card.capability, card.shared_memory >> 10, card.processor_memory >> 10) == (
        architecture,
        program,
        processor,
    )
    assert card.warp_size == wave
    if architecture == "gfx942":
        assert replace(card, name="", processors=0, memory=0) == replace(
            CARDS["gfx942"], name="", processors=0, memory=0
        )


def test_the_interpreter_has_one_processor():
    assert card_of(torch.device("cpu")).processors == 1


def test_float8_is_converted_from_ada_on():
    assert [name for name, card in CARDS.items() if card.has_float8] == ["sm_89", "sm_90", "sm_100", "sm_120", "sm_121"]
