"""The kernels' own threads (ops/cpu/team.h): every item is done once, whoever comes and whoever else asks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

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
