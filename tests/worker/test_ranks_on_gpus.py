"""Ranks on GPUs: each on a GPU of its own, or several on one. The GPUs are stand-ins, the processes are real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from quire.parallel.mesh import open_meeting

# A rank prints its device, its forward, the all-reduces and reduce-scatters of each of its graphs, and the size of its
# cache.
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.append(sys.argv.pop())
from benchmarks.gpu.tracing import stand_in
from quire.gpu.cards import CARDS
rank, port, count, divided = map(int, sys.argv[1:])
with stand_in(CARDS["sm_90"], count):
    from quire.config import EngineConfig
    from quire.loading.hub import bundled_model
    from quire.parallel.mesh import join
    from quire.parallel.sizes import MeshSizes
    from quire.worker.worker import Worker
    config = EngineConfig.create(
        device="cuda", max_num_seqs=2, max_num_batched_tokens=32, gpu_memory_utilization=0.5,
        num_gpu_blocks_override=99, tensor_parallel_size=2, enable_sequence_parallel=bool(divided),
    )
    mesh = join(MeshSizes(tp=2), rank, "127.0.0.1", port, kind="cuda")
    budgets, minimum = [], mesh.replica.minimum
    object.__setattr__(mesh.replica, "minimum", lambda value: budgets.append(value) or minimum(value))
    worker = Worker(config, bundled_model(), 64, mesh)
    forward = worker.runner.forward
    graphs = [graph.replay.__self__._launches for graph in getattr(forward, "_graphs", {}).values()]
    sums = [sum(launch.name.startswith(("all_reduce", "reduce_scatter")) for launch in launches) for launches in graphs]
    gathered = [sum(launch.name.startswith("all_gather") for launch in launches) for launches in graphs]
    print(json.dumps([str(worker.device.torch_device), type(forward).__name__, sums, budgets[0], gathered]))
"""


def two_ranks(gpus: int, divided: bool = False) -> list[list[Any]]:
    store = open_meeting("127.0.0.1")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    repository = str(Path(__file__).parents[2])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, (rank, store.port, gpus, int(divided))), repository],
            stdout=subprocess.PIPE, text=True, env={"GLOO_SOCKET_IFNAME": "lo", **environment},
        )
        for rank in range(2)
    ]  # fmt: skip
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]


def test_ranks_with_a_gpu_each_capture_their_all_reduces():
    first, second = two_ranks(gpus=2)
    assert (first[0], second[0]) == ("cuda:0", "cuda:1")
    assert first[1] == second[1] == "CapturedForward"
    assert first[2] == second[2]
    assert len(first[2]) > 1
    assert len({*first[2]}) == 1  # as many in each size, two for each layer
    assert first[2][0] % 2 == 0
    assert first[3] == second[3] == 40 * 2**30  # half of a card


@pytest.mark.slow
def test_graphs_hold_the_exchanges_of_ranks_that_divide_tokens():
    (_, kind, sums, _, gathered), second = two_ranks(gpus=2, divided=True)
    assert kind == "CapturedForward"
    assert [sums, gathered] == [second[2], second[4]]
    assert len({*sums}) == 1
    assert gathered == [count + 1 for count in sums]  # and the final hidden states


def test_ranks_that_share_a_gpu_run_eagerly_and_share_its_memory():
    first, second = two_ranks(gpus=1)
    assert (first[0], second[0]) == ("cuda:0", "cuda:0")
    assert first[1] == second[1] == "Forward"
    assert first[3] == second[3] == 20 * 2**30  # half of half of the card
