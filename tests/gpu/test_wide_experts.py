"""Replicas that share experts replay CUDA graphs: no layer of them waits for the host, on a GPU that is not there.

The kernels of DeepEP and of torch's NVSHMEM ops are not there either. Functions that only make tensors of the right
sizes take their place, so this shows what Quire does around them.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from support.stand_in import run_on_stand_in

pytestmark = pytest.mark.slow

CODE = """
    import json
    import sys
    import tempfile
    from pathlib import Path
    from types import SimpleNamespace
    from unittest import mock
    import torch
    import torch.distributed._symmetric_memory as memory
    from benchmarks.gpu.shapes import few_layers, write_config
    from quire import LLM, SamplingParams
    from quire.parallel.mesh import Communicator, Mesh

    RANKS = 8

    class Buffer:
        def __init__(self, group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank):
            assert low_latency_mode and num_qps_per_rank * RANKS == 128 + redundant

        @staticmethod
        def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
            return 1

        def low_latency_dispatch(self, x, topk_idx, most, num_experts, use_fp8, return_recv_hook):
            device.launched("low_latency_dispatch", {"x": x})
            count = num_experts // RANKS
            received = x.new_empty(count, most * RANKS, x.shape[1])
            return received, torch.empty(count, dtype=torch.int32, device=x.device), (), None, lambda: None

        def low_latency_combine(self, x, topk_idx, topk_weights, handle, return_recv_hook):
            device.launched("low_latency_combine", {"x": x})
            return x.new_empty(len(topk_idx), x.shape[2]), None, lambda: None

    sys.modules["deep_ep"] = SimpleNamespace(Buffer=Buffer)
    memory.is_nvshmem_available = lambda: True
    memory.set_backend = lambda name: None
    memory.empty = torch.empty
    memory.rendezvous = lambda tensor, name: None
    for name in ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset"):
        setattr(torch.ops.symm_mem, name, lambda *a, name=name: device.launched(name, {"args": a}))
    folder = Path(tempfile.mkdtemp())
    path = write_config(folder / "model", few_layers("qwen3-30b-a3b"))
    group = Communicator(0, RANKS, SimpleNamespace(group_name="all"), capturable=True)
    mesh = Mesh(size=RANKS, neighbours=range(1), dp=group, ep=group)
    found = {}
    for backend, eplb in (("auto", False), ("auto", True), ("deepep_low_latency", False), ("symmetric_memory", False)):
        redundant = 8 if eplb else 0
        balance = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 8}} if eplb else {}
        with mock.patch("quire.executor.uniproc.Mesh", return_value=mesh):
            llm = LLM(
                str(path), device="cuda", load_format="dummy", max_model_len=64, max_num_seqs=4, dtype="bfloat16",
                enable_prefix_caching=False, cudagraph_capture_sizes=[4, 512], require_cuda_graphs=True,
                max_num_batched_tokens=512, enable_expert_parallel=True, all2all_backend=backend, **balance
            )
        forward = llm.core.executor.runner.forward
        with device.traced() as launches:
            llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        sizes = sorted({size.tokens for size in forward._graphs})
        names = [launch.name for launch in launches]
        found[f"{backend} {eplb}"] = [type(forward).__name__, sizes, names]
    print(json.dumps(found))
"""
EXCHANGES = {
    "auto False": {"all_gather", "reduce_scatter"},
    "auto True": {"all_gather", "reduce_scatter"},
    "deepep_low_latency False": {"low_latency_dispatch", "low_latency_combine"},
    "symmetric_memory False": {"all_to_all_vdev_2d", "all_to_all_vdev_2d_offset"},
}


def test_graphs_contain_every_exchange_with_a_fixed_capacity():
    found = json.loads(run_on_stand_in(CODE).splitlines()[-1])
    assert found.keys() == EXCHANGES.keys()
    for case, (forward, sizes, names) in found.items():
        assert forward == "CapturedForward", case
        assert sizes == [4], "steps of more than 256 tokens are exchanged by counts, and not captured"
        for exchange in EXCHANGES[case]:
            assert any(name.startswith(exchange) for name in names), (case, exchange)
