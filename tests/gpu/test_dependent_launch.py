"""Programmatic dependent launch: kernels wait for the kernel before them prior to reading anything."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from support.stand_in import run_on_stand_in

CODE = """
    import json
    import torch
    from benchmarks.gpu import skew
    from quire.ops.reference.quantized import QuantizedMatrix
    from quire.ops.triton import elementwise, linear, rounding

    def layer():
        x, residual, up = (torch.zeros(2, size, dtype=torch.bfloat16, device="cuda") for size in (512, 512, 1024))
        norm = torch.zeros(512, dtype=torch.bfloat16, device="cuda")
        elementwise.rms_norm(x, norm, 1e-5)
        elementwise.add_rms_norm(x, residual, norm, 1e-5)
        elementwise.silu_and_mul(up)
        codes = torch.zeros(6144, 512, dtype=torch.uint8, device="cuda")
        matrix = linear.pack(QuantizedMatrix(codes, torch.zeros(6144, 1, device="cuda"), 512, 512))
        linear.quantized_linear_triton(x, matrix, None)
        linear.linear_of_few_rows(x, torch.zeros(6144, 512, dtype=torch.bfloat16, device="cuda"), None)
        rounding.add_rms_norm_rounded(x, residual, norm, 1e-5, torch.int8)
        rounding.silu_and_mul_rounded(up, torch.int8)

    found = {}
    with device.traced() as traced:
        layer()
    kernels = [launch for launch in traced if launch.kernel is not None]
    for counts in ((1,) * 8, (1,) * 8 + (64,)):
        kernels += skew.launches(device, counts)
    for launch in kernels:
        ptx = launch.kernel.asm["ptx"]
        texts = ("griddepcontrol.wait", "ld.global", "cp.async", "griddepcontrol.launch_dependents")
        wait, *loads, start = (ptx.find(text) for text in texts)
        pdl = getattr(launch.kernel.metadata, "launch_pdl", False)
        load = min(place for place in loads if place >= 0)
        found.setdefault(launch.name, []).append([bool(pdl), wait, load, start])
    print(json.dumps(found))
"""


def traced(card: str) -> dict[str, list[list[int]]]:
    """The launches of a layer by name: whether launch_pdl is set, and the places of instructions in the PTX."""
    found = json.loads(run_on_stand_in(CODE, card).splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_kernels_wait_before_they_load() -> None:
    found = traced("sm_90")
    assert found.keys() >= {
        "attend_kernel",
        "merge_kernel",
        "_product",
        "_rms_norm",
        "_add_rms_norm",
        "_gate",
        "_rounded",
    }
    assert found.keys() >= {"_add_rms_norm_rounded", "_silu_and_mul_rounded"}
    for name, launches in found.items():
        if name != "plan_kernel":  # once a step
            for is_overlapped, wait, load, start in launches:
                assert is_overlapped, name
                assert 0 < start < wait < load, name


@pytest.mark.nightly
def test_older_cards_launch_one_kernel_after_the_other() -> None:
    for launches in traced("sm_80").values():
        assert all(launch[:2] == [False, -1] for launch in launches)
