"""The kernels' own threads (ops/cpu/team.h): every item is done once, whoever comes and whoever else asks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.ops.cpu import build
from quire.ops.cpu.build import library
from quire.ops.cpu.linear import linear_cpu
from quire.ops.cpu.sampling import argmax

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels cannot be compiled here")


@pytest.fixture(params=[2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Also more than there are cores: then members are often kept from coming."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_many_short_pieces_of_work_are_all_done(threads):
    torch.manual_seed(0)
    logits = torch.randn(40, 9000)
    wanted = logits.argmax(-1)
    for _ in range(3000):
        assert torch.equal(argmax(logits), wanted)


def test_several_threads_of_python_may_ask_at_once(threads):
    torch.manual_seed(0)
    weight = torch.randn(640, 512).bfloat16()
    packed = linear_cpu.pack(weight.clone())
    inputs = [torch.randn(9, 512).bfloat16() for _ in range(4)]
    wanted = [linear_cpu(x, packed, None) for x in inputs]

    def ask(index: int) -> bool:
        return all(torch.equal(linear_cpu(inputs[index], packed, None), wanted[index]) for _ in range(400))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))


STEPS = """
#include <cstdio>
#include "upcoming.h"
using namespace quire;

int main() {
  static Upcoming upcoming;
  static char weights[3][8192];
  Upcoming::Progress progress;
  printf("%d", upcoming.fetch(1, progress));
  for (int product : {0, 1, 2, 0, 1, 2, 0, 2, 0, 2, 0}) {
    upcoming.begin({weights[product], 2048, 4, 2});
    upcoming.fetch(1, progress);
    printf(" %d", progress.next);
  }
}
"""


@pytest.mark.skipif(build.find_compiler() is None, reason="there is no compiler")
def test_what_followed_in_the_step_before_is_fetched(tmp_path):
    compiler, source, program = build.find_compiler() or [], tmp_path / "steps.cpp", tmp_path / "steps"
    source.write_text(STEPS)
    folder = Path(build.__file__).parent
    subprocess.run([*compiler, "-std=c++17", f"-I{folder}", str(source), "-o", str(program)], check=True)
    first, second, changed = "0 0 0", "1 2 0", "1 0 1 0 1"  # which product of the step is fetched beside each
    assert subprocess.check_output([program], text=True) == f"0 {first} {second} {changed}"
