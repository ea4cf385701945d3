"""Hidden states pass from stage to stage, and each link carries every value once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.parallel.mesh import open_meeting
from support.waiting import LONGEST

# Each rank prints how many bytes it sent to each other rank.
PROGRAM = """
import os, sys
from collections import Counter
import torch
import torch.distributed as dist
from quire.parallel.mesh import join
from quire.parallel.pipeline import Pipe
from quire.parallel.sizes import MeshSizes
from quire.parallel.residual_stream import DividedStream, ResidualStream
stages, ranks, rank, port = map(int, sys.argv[1:])
mesh, sent, isend = join(MeshSizes(pp=stages, tp=ranks), rank, "127.0.0.1", port), Counter(), dist.isend
def counted(x, group, group_dst):
    sent[dist.get_global_rank(group, group_dst)] += x.nbytes
    return isend(x, group=group, group_dst=group_dst)
dist.isend = counted
streams = [kind(mesh.tp) for kind in (ResidualStream, DividedStream)]
pipes = [Pipe(mesh.pp, stream, 7) for stream in streams]
for stream, pipe in zip(streams, pipes):
    for step in range(20):  # the first stage is ahead of the others
        tokens = 1 + step % 5 * 40_000
        wanted = stream.own(torch.arange(tokens * 7.0).view(tokens, 7) + step)
        x = wanted.clone() if pipe.is_first else pipe.receive(tokens, torch.float32, torch.device("cpu"))
        assert torch.equal(x, wanted)
        if not pipe.is_last:
            pipe.send(x)
            x.zero_()  # what was sent is a copy
mesh.replica.minimum(0)
print(dict(sent), flush=True)
os._exit(0)
"""
TOKENS = [1 + step % 5 * 40_000 for step in range(20)]


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize(("stages", "ranks"), [(2, 2), (3, 1)])
def test_each_link_carries_every_value_once(stages: int, ranks: int) -> None:
    store = open_meeting("127.0.0.1")
    command = [sys.executable, "-c", PROGRAM, str(stages), str(ranks)]
    processes = [
        subprocess.Popen([*command, str(rank), str(store.port)], stdout=subprocess.PIPE, text=True)
        for rank in range(stages * ranks)
    ]
    said = [process.communicate(timeout=LONGEST)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    values = [sum(TOKENS) * columns for columns in ([4, 3] if ranks == 2 else [7])]
    for tokens in TOKENS:  # that are divided: the first rank may have one more
        for part in range(ranks):
            values[part] += 7 * ((tokens + ranks - 1 - part) // ranks)
    for rank, text in enumerate(said):
        stage, part = divmod(rank, ranks)
        wanted = {} if stage == stages - 1 else {rank + ranks: values[part] * 4}
        assert text == str(wanted)
