"""Products with AMX: with functions in place of its instructions, on any processor, and as the compiler makes them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from attention.test_attention import BFLOAT16, MIXED, World
from attention.test_attention import build as attention_of
from ops.test_ops import check_packed_products
from ops.test_quantized import (
    check_joined_experts,
    check_packed_experts,
    check_products,
    check_that_activations_are_rounded_to_8_bits,
    check_values_of_float8,
)

from quire.attention.cpu import CpuAttention
from quire.ops.cpu import build, linear, quantized_linear

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        build.find_compiler() is None or platform.machine() != "x86_64", reason="no compiler for x86-64"
    ),
]


@pytest.fixture
def sources_of_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only these are compiled."""
    folder = tmp_path / "sources"
    names = (
        "attention",
        "attention_prepare",
        "float8_linear",
        "linear",
        "narrow_codes",
        "quantize",
        "quantized_linear",
        "team",
    )
    folder.mkdir()
    for source in [*build.SOURCES.glob("*.h"), *(build.SOURCES / f"{name}.cpp" for name in names)]:
        shutil.copy(source, folder)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))


@pytest.mark.nightly
def test_products_of_tiles_compute_what_the_references_do(sources_of_products, monkeypatch, tmp_path):
    large, native = 2.0**30, build.INSTRUCTION_SETS["native"][0]
    x, weight = torch.tensor([[large, 1, -large, 1]]).bfloat16(), torch.ones(1, 4).bfloat16()
    made = []
    for flags in ([], ["-DQUIRE_SOFTWARE_TILES"]):
        library = build.load(tmp_path, [*build.FLAGS, native, *flags])
        monkeypatch.setattr(build, "_kernel", cache(library.function))
        made.append(linear.linear_cpu(x, linear.linear_cpu.pack(weight.clone()), None).item())
    # Tiles add up the first elements of words and the second ones separately. The first library may have tiles, too.
    assert made[0] <= made[1] == 2
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):  # the latter's dense products do without tiles
        check_packed_products(linear.linear_cpu, dtype)
        check_products(quantized_linear.quantized_linear_cpu, dtype)
        check_joined_experts((150, 1, 90), dtype)
    check_values_of_float8(quantized_linear.quantized_linear_cpu)
    check_that_activations_are_rounded_to_8_bits(quantized_linear.quantized_linear_cpu)
    check_packed_experts(torch.bfloat16)
    for dim, window in ((80, None), (64, 16)):
        World(attention_of(CpuAttention, 14, 2, dim, 16, BFLOAT16), MIXED).check(window)
    World(attention_of(CpuAttention, 5, 1, 144, 16, BFLOAT16, 128), MIXED).check()


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_the_kernels_for_amx_have_its_instructions(sources_of_products, tmp_path):
    found = {}
    for name in ("amx", "avx512-bf16"):
        shown = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(build.compile_for(name, tmp_path))],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found[name] = set(re.findall(r"\t(ldtilecfg|tile\w+|tdp\w+)", shown))
    loads = {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"}
    assert found == {"amx": {*loads, "tdpbf16ps", "tdpbsud"}, "avx512-bf16": set()}
