"""The kernels for AArch64: compiled by a cross compiler and run by an emulator, they compute what the references do."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quire.ops.cpu import build, linear
from support.emulated import CROSS_COMPILER, PROCESSORS, EmulatedLibrary, need_emulator
from support.kernel_checks import check_against_references

pytestmark = pytest.mark.xdist_group("emulated")
# Emulation is slow: with each change, one processor's library is compiled, and products of a row are computed. All
# else is tested every night.
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name == "neon-bf16" else pytest.mark.nightly) for name in PROCESSORS
]
# The instructions that make an instruction set worth compiling for.
CHARACTERISTIC = {
    "neon": {"fmla", "smull", "smull2", "sadalp", "tbl"},
    "neon-dotprod": {"fmla", "sdot", "tbl"},
    "neon-bf16": {"fmla", "usdot", "usmmla", "bfdot", "bfmmla", "bfcvtn", "tbl"},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The library for an instruction set, compiled once: with few optimizations, since that is faster."""
    need_emulator()
    folder = tmp_path_factory.mktemp("emulated")

    def path(name: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", CROSS_COMPILER)
            patch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))
            return build.compile_for(name, folder)

    return path


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest, paths, monkeypatch) -> Iterator[EmulatedLibrary]:
    emulated = EmulatedLibrary(paths(request.param), request.param, monkeypatch)
    yield emulated
    emulated.close()


@pytest.mark.nightly
def test_emulated_kernels_compute_what_the_references_do(library, monkeypatch):
    check_against_references(library, monkeypatch)


@pytest.mark.nightly
def test_emulated_products_of_a_row_do_not_depend_on_the_other_rows(library, monkeypatch):
    monkeypatch.setattr(build, "_kernel", library.function)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, weight = torch.randn(23, 130).to(dtype), torch.randn(70, 130).to(dtype)
        product = linear.linear_cpu
        packed = product.pack(weight)
        made = product(x, packed, None)
        for row in range(len(x)):
            assert torch.equal(product(x[row : row + 1], packed, None), made[row : row + 1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_library_has_the_instructions_of_its_set_and_no_others(paths, name):
    command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(paths(name))]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = Counter(re.findall(r"^ *[0-9a-f]+:\t(\w+)", shown, re.M))
    assert found.keys() >= CHARACTERISTIC[name]
    better = {"neon": {"sdot", "usdot", "bfdot"}, "neon-dotprod": {"usdot", "bfdot"}, "neon-bf16": set[str]()}
    assert not found.keys() & better[name]
