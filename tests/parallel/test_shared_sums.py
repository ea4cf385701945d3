"""Sums through shared memory: those of the ranks' tensors in float32, with the same bits on every rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.ops.cpu.build import library
from quire.parallel.mesh import open_meeting
from support.waiting import LONGEST

# The programs end with os._exit, because Gloo's threads sometimes abort a process that ends right after a collective.
RANK = """
import os, sys
from pathlib import Path
import torch
from quire.ops.cpu import shared_sums
from quire.parallel.mesh import MeshSizes, join

shared_sums._SLOT_BYTES = 4096  # several rounds for most sizes
ranks, rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
group = join(MeshSizes(tp=ranks), rank, "127.0.0.1", port).tp
shared = shared_sums.with_shared_sums(group)
assert isinstance(shared.shortcut, shared_sums.SharedSums) and shared.capturable
made = []
draw = torch.Generator().manual_seed(rank)
for turn in range(3):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (1, 15, 16, 17, 1000, 5000):
            x = torch.randn(size, generator=draw).to(dtype)
            made.append((x.clone(), shared.all_reduce(x)))
for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):  # rows of each rank; int64 sums take Gloo
    for rows, columns in ((1, 5), (2, 3000), (4, 1), (11, 700)):
        start, stop = group.share(rows)
        x = torch.arange(rows * columns).view(rows, columns).remainder(7).to(dtype)
        assert torch.equal(shared.all_gather_rows(x[start:stop].clone(), rows), x)
        if dtype is not torch.uint8:
            summed = x[start:stop] * sum(range(1, ranks + 1))
            assert torch.equal(shared.reduce_scatter(x * (rank + 1)), summed)
for x in (torch.arange(6) + rank, torch.full((4, 4), float(rank)).t()[1:], torch.empty(0, 3)):  # as without
    assert torch.equal(shared.all_reduce(x.clone()), group.all_reduce(x.clone()))
assert shared.broadcast(torch.tensor([rank])).tolist() == [0]
torch.save(made, folder / f"{rank}.pt")
os._exit(0)
"""


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="these sums are C++, and there is no compiler")
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_all_ranks_have_the_sum(tmp_path: Path, ranks: int) -> None:
    meeting = open_meeting("127.0.0.1")
    command = [sys.executable, "-c", RANK, str(ranks)]
    processes = [
        subprocess.Popen([*command, str(rank), str(meeting.port), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    for process in processes:
        _, said = process.communicate(timeout=LONGEST)
        assert process.returncode == 0, said
    made = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for summands in zip(*made, strict=True):
        wanted = sum(x.double() for x, _ in summands)
        for _, total in summands:
            assert torch.equal(total, summands[0][1])
            tolerance = 1e-6 if total.dtype is torch.float32 else 2**-8
            torch.testing.assert_close(total.double(), wanted, rtol=tolerance, atol=tolerance)


WITHOUT = """
import os, sys
import torch
from quire.ops.cpu import shared_sums
from quire.parallel.mesh import MeshSizes, join

rank, port, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def refuse(*arguments):
    raise OSError("there is none")

if rank == 0 and where == "none is given":
    os.memfd_create = refuse
if rank == 1 and where == "one rank cannot open it":
    os.open = refuse
if rank == 1 and where == "one rank has no kernels":
    shared_sums.library = lambda: None
group = join(MeshSizes(tp=2), rank, "127.0.0.1", port).tp
shared = shared_sums.with_shared_sums(group)
assert shared == group and not shared.capturable
print(shared.all_reduce(torch.ones(3)).tolist(), flush=True)
os._exit(0)
"""


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("where", ["none is given", "one rank cannot open it", "one rank has no kernels"])
def test_without_such_memory_ranks_add_up_as_before(where: str) -> None:
    meeting = open_meeting("127.0.0.1")
    processes = [
        subprocess.Popen([sys.executable, "-c", WITHOUT, str(rank), str(meeting.port), where], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    assert [process.communicate(timeout=LONGEST)[0].decode() for process in processes] == ["[2.0, 2.0, 2.0]\n"] * 2


def test_a_group_of_one_needs_no_memory() -> None:
    from quire.ops.cpu.shared_sums import with_shared_sums
    from quire.parallel.mesh import Communicator

    assert with_shared_sums(Communicator()) == Communicator()
