"""Ranks of several machines meet at the store of the head, through a connection that needs the cluster's secret."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from quire.parallel.rendezvous_store import RendezvousStore
from support.cluster import SECRET, listening
from support.waiting import LONGEST

TESTS = Path(__file__).parents[1]

# Two ranks on each of two machines: each prints a sum over all ranks, one over its tensor group, and what is where.
PROGRAM = """
import os, sys, torch
from quire.parallel.rendezvous_store import Meeting
from quire.parallel.mesh import join
from quire.parallel.sizes import MeshSizes
from support.cluster import SECRET
rank, address = int(sys.argv[1]), sys.argv[2]
first = rank // 2 * 2
here = range(first, first + 2)
mesh = join(MeshSizes(pp=2, tp=2), rank, "", 0, "cpu", Meeting(SECRET, address), here, frozenset(here))
sums = [int(group.all_reduce(torch.tensor([10 ** rank]))) for group in (mesh.replica, mesh.tp, mesh.pp)]
print(*sums, mesh.ranks_on_machine, flush=True)
os._exit(0)
"""


@pytest.mark.nightly
def test_ranks_meet_at_the_store_of_the_head():
    with listening() as head:
        command = [sys.executable, "-c", PROGRAM]
        ranks = [
            subprocess.Popen([*command, str(rank), head.head.address], stdout=subprocess.PIPE, text=True, cwd=TESTS)
            for rank in range(4)
        ]
        said = [rank.communicate(timeout=LONGEST)[0].split() for rank in ranks]
    assert said == [["1111", str(11 * 100 ** (r // 2)), str(101 * 10 ** (r % 2)), "2"] for r in range(4)]


def test_the_store_does_what_torchs_stores_do():
    with listening() as head:
        store, other = RendezvousStore(SECRET, head.head.address), RendezvousStore(SECRET, head.head.address)
        store.set("text", "value")
        other.set("bytes", b"\0\xff")
        assert other.get("text") == b"value"
        assert store.get("bytes") == b"\0\xff"
        assert store.check(["text", "bytes"])
        assert not store.check(["text", "none"])
        store.wait(["text"], timedelta(seconds=LONGEST))
        assert [store.add("n", 2), other.add("n", 3)] == [2, 5]
        assert store.delete_key("text")
        assert not store.delete_key("text")
        assert store.clone().get("n") == b"5"
