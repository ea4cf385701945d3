"""Programmatic dependent launch: kernels of attention wait for the kernel before them prior to reading anything."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from support.stand_in import run_on_stand_in

CODE = """
    import json
    from benchmarks.gpu import skew
    found = {}
    for counts in ((1,) * 8, (1,) * 8 + (64,)):
        for launch in skew.launches(device, counts):
            ptx = launch.kernel.asm["ptx"]
            texts = ("griddepcontrol.wait", "ld.global", "griddepcontrol.launch_dependents")
            places = [ptx.find(text) for text in texts]
            pdl = getattr(launch.kernel.metadata, "launch_pdl", False)
            found.setdefault(launch.name, []).append([bool(pdl), *places])
    print(json.dumps(found))
"""


def traced(card: str) -> dict[str, list[list[int]]]:
    """The launches of attention by name: whether launch_pdl is set, and the places of instructions in the PTX."""
    found = json.loads(run_on_stand_in(CODE, card).splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_kernels_wait_before_they_load() -> None:
    found = traced("sm_90")
    for name in ("attend_kernel", "merge_kernel"):
        for is_overlapped, wait, load, _ in found[name]:
            assert is_overlapped
            assert 0 < wait < load
    assert all(start > 0 for *_, start in found["attend_kernel"])


@pytest.mark.nightly
def test_older_cards_launch_one_kernel_after_the_other() -> None:
    for launches in traced("sm_80").values():
        assert all(launch[:2] == [False, -1] for launch in launches)
