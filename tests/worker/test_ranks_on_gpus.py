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
from support.stand_in import run_on_stand_in
from support.waiting import LONGEST

pytestmark = pytest.mark.slow

# A rank prints its device, its forward, the collectives of each of its graphs, its budget, and its attention backends.
PROGRAM = """
import json, sys, warnings
from collections import Counter
warnings.simplefilter("ignore")
sys.path.append(sys.argv.pop())
from benchmarks.gpu.tracing import stand_in
from quire.platform.gpu.cards import CARDS
rank, port, count = map(int, sys.argv[1:4])
sizes, options = json.loads(sys.argv[4])
with stand_in(CARDS["sm_90"], count):
    from quire.config.engine import EngineConfig
    from quire.checkpoints.hub import bundled_model
    from quire.parallel.mesh import join
    from quire.parallel.sizes import MeshSizes
    from quire.worker.worker import Worker
    config = EngineConfig.create(
        device="cuda", max_num_seqs=2, max_num_batched_tokens=32, gpu_memory_utilization=0.5,
        num_gpu_blocks_override=99, **options,
    )
    mesh = join(MeshSizes(**sizes), rank, "127.0.0.1", port, kind="cuda")
    budgets, minimum = [], mesh.replica.minimum
    object.__setattr__(mesh.replica, "minimum", lambda value: budgets.append(value) or minimum(value))
    worker = Worker(config, bundled_model(), 64, mesh)
    forward = worker.runner.forward
    graphs = [graph.replay.__self__._launches for graph in getattr(forward, "_graphs", {}).values()]
    collectives = "all_reduce", "all_gather", "reduce_scatter", "all_to_all_single", "batch_isend_irecv"
    counted = [
        Counter(kind for launch in launches for kind in collectives if launch.name.startswith(kind))
        for launches in graphs
    ]
    backends = [backend.name for backend in worker.plan.backends]
    print(json.dumps([str(worker.device.torch_device), type(forward).__name__, counted, budgets[0], backends]))
"""


def two_ranks(gpus: int, sizes: dict[str, int] | None = None, **options: Any) -> list[list[Any]]:
    store = open_meeting("127.0.0.1")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM,
                str(rank),
                str(store.port),
                str(gpus),
                json.dumps([sizes or {"tp": 2}, options]),
                str(Path(__file__).parents[2]),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={"GLOO_SOCKET_IFNAME": "lo", **environment},
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=LONGEST)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.mark.nightly
def test_ranks_with_a_gpu_each_capture_their_all_reduces():
    first, second = two_ranks(gpus=2)
    assert (first[0], second[0]) == ("cuda:0", "cuda:1")
    assert first[1] == second[1] == "CapturedForward"
    assert first[2] == second[2]
    assert len(first[2]) > 1
    assert all(counted == first[2][0] for counted in first[2])  # as many in each size, two for each layer
    assert first[2][0]["all_reduce"] % 2 == 0
    assert first[3] == second[3] == 40 * 2**30  # half of a card


@pytest.mark.nightly
def test_ranks_that_share_a_gpu_run_eagerly_and_share_its_memory():
    first, second = two_ranks(gpus=1)
    assert (first[0], second[0]) == ("cuda:0", "cuda:0")
    assert first[1] == second[1] == "Forward"
    assert first[3] == second[3] == 20 * 2**30  # half of half of the card


@pytest.mark.nightly
@pytest.mark.slow
def test_graphs_hold_the_exchanges_of_ranks_that_divide_tokens():
    first, second = two_ranks(2, tensor_parallel_size=2, enable_sequence_parallel=True)
    assert first[1] == "CapturedForward"
    assert first[2] == second[2]
    sums = [counted.get("all_reduce", 0) + counted["reduce_scatter"] for counted in first[2]]
    assert len({*sums}) == 1
    gathered = [counted["all_gather"] for counted in first[2]]
    assert gathered == [count + 1 for count in sums]  # and the final hidden states


ONE_KV_HEAD = {"load_format": "dummy", "hf_overrides": {"num_key_value_heads": 1}}


@pytest.mark.nightly
@pytest.mark.slow
def test_decode_context_parallelism_is_captured_with_what_the_ranks_exchange():
    """A plan does not ask what is on the device."""
    options = {**ONE_KV_HEAD, "tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    first, second = two_ranks(2, {"tp": 2, "dcp": 2}, **options)
    assert first[1] == second[1] == "CapturedForward"
    assert first[2] == second[2]
    layers = first[2][0]["all_gather"]
    assert layers > 1
    assert all(
        counted == {"all_reduce": 2 * layers, "all_gather": layers, "all_to_all_single": layers} for counted in first[2]
    )
    assert first[4] == second[4] == ["triton over stripes"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "how"), [pytest.param({}, "by heads", marks=pytest.mark.nightly), (ONE_KV_HEAD, "over stripes")]
)
def test_prefill_context_parallelism_runs_eagerly_without_waiting_for_the_device(options, how):
    first, second = two_ranks(2, {"cp": 2}, prefill_context_parallel_size=2, **options)
    assert first[1] == second[1] == "ContextForward"
    assert first[4] == second[4] == [f"triton {how}"]


@pytest.mark.nightly
def test_ranks_that_share_a_gpu_cannot_divide_contexts():
    code = """
        from quire.config.engine import ConfigError, EngineConfig
        from quire.checkpoints.hub import bundled_model
        from quire.parallel.mesh import Communicator, Mesh
        from quire.worker.worker import Worker
        config = EngineConfig.create(device="cuda", prefill_context_parallel_size=2)
        try:
            Worker(config, bundled_model(), 64, Mesh(0, size=2, cp=Communicator(0, 2)))
        except ConfigError as error:
            print(error)
    """
    assert "need a GPU for each rank, but 2 ranks share one" in run_on_stand_in(code)
