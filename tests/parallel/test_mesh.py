"""Which ranks form which group, and what the collectives of real groups compute."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from quire.parallel.mesh import Communicator, Mesh, backend, join, open_meeting
from quire.parallel.sizes import MeshSizes
from support.waiting import LONGEST

AXES = ["dp", "pp", "cp", "tp", "ep"]


def test_ranks_are_numbered_with_tensor_parallelism_fastest():
    sizes = MeshSizes(dp=2, pp=2, tp=2)
    assert sizes.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sizes.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sizes.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sizes.groups("cp") == [[rank] for rank in range(8)]


def test_experts_are_shared_over_all_ranks_of_a_pipeline_stage():
    assert MeshSizes(dp=2, tp=2).groups("ep") == [[0, 1, 2, 3]]
    assert MeshSizes(dp=2, pp=2, tp=2).groups("ep") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert MeshSizes(dp=2, cp=2, tp=2).groups("ep") == [list(range(8))]
    assert MeshSizes(pp=2).groups("ep") == [[0], [1]]


@pytest.mark.parametrize("sizes", list(itertools.product([1, 2, 3], repeat=4)))
def test_each_rank_is_in_one_group_of_each_axis(sizes):
    mesh = MeshSizes(*sizes)
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world))
        size = mesh.dp * mesh.cp * mesh.tp if axis == "ep" else getattr(mesh, axis)
        assert {len(group) for group in groups} == {size}
        assert all(group == sorted(group) for group in groups)


def test_ranks_of_one_group_differ_only_along_its_axis():
    sizes = MeshSizes(2, 3, 2, 2)
    places = list(itertools.product(*(range(n) for n in (2, 3, 2, 2))))  # rank -> its number along dp, pp, cp, tp
    for index, axis in enumerate(AXES[:4]):
        for group in sizes.groups(axis):
            fixed = {tuple(n for i, n in enumerate(places[rank]) if i != index) for rank in group}
            assert len(fixed) == 1
            assert [places[rank][index] for rank in group] == list(range(len(group)))


def test_a_mesh_of_one_rank_meets_nobody_and_its_collectives_change_nothing():
    mesh = join(MeshSizes(), 0, "no.such.host.invalid", 1)
    assert mesh == Mesh()
    x = torch.arange(6.0).view(2, 3)
    for axis in AXES:
        communicator: Communicator = getattr(mesh, axis)
        assert communicator.all_reduce(x) is x
        assert communicator.all_gather(x, 3) is x
        assert communicator.reduce_scatter(x) is x
        assert communicator.all_gather_rows(x, 2) is x
        assert communicator.minimum(7) == 7
        assert communicator.share(5) == (0, 5)


@pytest.mark.parametrize(("total", "size"), [(8, 2), (7, 2), (7, 4), (2, 4), (0, 3)])
def test_shares_are_equal_but_for_the_last_and_cover_everything(total, size):
    shares = [Communicator(rank, size).share(total) for rank in range(size)]
    assert [i for start, stop in shares for i in range(start, stop)] == list(range(total))
    assert max(stop - start for start, stop in shares) == -(-total // size)


def test_the_gpus_of_a_machine_go_to_its_ranks_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert [Mesh(rank, size=6).device("cuda").index for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert Mesh(3).device("cpu") == torch.device("cpu")


def test_ranks_that_share_a_gpu_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [Mesh(rank, size=3).ranks_on_device("cuda") for rank in range(3)] == [2, 1, 2]
    assert Mesh().ranks_on_device("cuda") == 1
    assert Mesh(1, size=4).ranks_on_device("cpu") == 4


def test_gpus_exchange_tensors_themselves_if_each_rank_has_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert backend("cuda", 2) == "cpu:gloo,cuda:nccl"
    assert backend("cuda", 3) == "gloo"
    assert backend("cpu", 2) == "gloo"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert backend("cuda", 2) == "gloo"


# Each of four ranks prints, for each axis: its number and the group's size, a sum, what was gathered, and a minimum.
PROGRAM = """
import os, sys, torch
from quire.parallel.mesh import join
from quire.parallel.sizes import MeshSizes
rank, port = int(sys.argv[1]), int(sys.argv[2])
mesh = join(MeshSizes(dp=2, tp=2), rank, "127.0.0.1", port)
assert mesh.rank == rank
for axis in ("dp", "pp", "cp", "tp", "ep"):
    group = getattr(mesh, axis)
    total = int(group.all_reduce(torch.tensor([10 ** rank])))
    start, stop = group.share(3)
    gathered = group.all_gather(torch.arange(start, stop)[None], 3)[0].tolist()
    for rows in (0, 1, 3, 8):  # some ranks have none, or fewer than others
        x = torch.arange(rows * 2.0).view(rows, 2)
        start, stop = group.share(rows)
        assert torch.equal(group.reduce_scatter(x * (group.rank + 1)), x[start:stop] * sum(range(group.size + 1)))
        assert torch.equal(group.all_gather_rows(x[start:stop], rows), x)
    print(axis, group.rank, group.size, total, gathered, group.minimum(rank), flush=True)
os._exit(0)  # Gloo may abort a process that ends right after a collective
"""


@pytest.mark.nightly
def test_four_processes_reduce_and_gather_along_each_axis():
    store = open_meeting("127.0.0.1")
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(store.port)], stdout=subprocess.PIPE, text=True) for rank in range(4)
    ]
    said: list[dict[str, Any]] = []
    for rank in ranks:
        output, _ = rank.communicate(timeout=LONGEST)
        assert rank.returncode == 0
        said.append({line.split()[0]: line.split(maxsplit=1)[1] for line in output.splitlines()})
    everything = "[0, 1, 2]"
    for rank, axes in enumerate(said):
        dp, tp = divmod(rank, 2)
        assert axes["dp"] == f"{dp} 2 {10**tp + 10 ** (tp + 2)} {everything} {tp}"
        assert axes["tp"] == f"{tp} 2 {11 * 100**dp} {everything} {2 * dp}"
        assert axes["ep"] == f"{rank} 4 1111 {everything} 0"
        assert axes["pp"] == axes["cp"] == f"0 1 {10**rank} {everything} {rank}"


def test_decode_context_parallelism_divides_the_tensor_parallel_ranks():
    sizes = MeshSizes(pp=2, cp=2, tp=4, dcp=2)
    assert sizes.world == 16
    assert sizes.groups("dcp") == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert sizes.groups("tp")[1] == [4, 5, 6, 7]
    assert sizes.groups("cp")[1] == [1, 5]


# Three ranks give each other rows, in several types, and none to some; then each sends to the next one while it
# receives from the one before, many tensors of different sizes on their way at once.
EXCHANGES = """
import os, sys, torch
from quire.parallel.mesh import join
from quire.parallel.sizes import MeshSizes
rank, port = int(sys.argv[1]), int(sys.argv[2])
group = join(MeshSizes(cp=3), rank, "127.0.0.1", port).cp
given = [[0, 2, 1], [3, 0, 0], [0, 0, 0]]
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
    x = (10 * rank + torch.arange(2 * sum(given[rank]))).view(2, -1).t().to(dtype)  # not contiguous
    out = group.all_to_all(x, given[rank], [counts[rank] for counts in given]).wait()
    print(out[:, 0].tolist() if len(out) else [], flush=True)
for distance in (1, 2):
    sizes = [0, 5, 100_000, 1, 3000]
    outs = [torch.empty(size * (1 + (rank - distance) % 3)) for size in sizes]
    parts = [torch.full((size * (1 + rank),), 10.0 * rank + i) for i, size in enumerate(sizes)]
    started = [group.pass_on(x, (rank + distance) % 3, out, (rank - distance) % 3) for x, out in zip(parts, outs)]
    for exchange in started:
        exchange.wait()
    assert all((out == 10.0 * ((rank - distance) % 3) + i).all() for i, out in enumerate(outs))
group.minimum(0)
os._exit(0)
"""


@pytest.mark.slow
def test_three_processes_exchange_rows_and_tensors():
    store = open_meeting("127.0.0.1")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXCHANGES, str(rank), str(store.port)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=LONGEST)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    for rank, rows in enumerate([[10, 11, 12], [0, 1], [2]]):
        assert said[rank] == [str(rows if i > 2 else [float(row) for row in rows]) for i in range(5)]
