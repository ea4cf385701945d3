"""The engine on a GPU that is not there."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from support.stand_in import run_on_stand_in

pytestmark = pytest.mark.slow


def test_the_whole_engine_runs_on_a_gpu_that_is_not_there():
    printed = run_on_stand_in("""
        import json
        from quire import LLM, SamplingParams
        llm = LLM(device="cuda", max_num_seqs=4, max_model_len=64, load_format="dummy", require_cuda_graphs=True)
        compiled = len(device.compilations)
        with device.traced() as launches:
            params = [SamplingParams(max_tokens=5, ignore_eos=True, logprobs=n, min_p=0.1) for n in (None, 2)]
            outputs = llm.generate(["one", "two words"], params, use_tqdm=False)
        kernels = sorted({launch.name for launch in launches if launch.kernel is not None})
        shared = max(launch.kernel.metadata.shared for launch in launches if launch.kernel is not None)
        print(json.dumps([[len(o.outputs[0].token_ids) for o in outputs], compiled, kernels, shared, device.waits]))
    """)
    lengths, compiled, kernels, shared, waits = json.loads(printed.splitlines()[-1])
    assert lengths == [5, 5]
    assert compiled > 5
    assert {"_flat_batch", "_gather"} <= set(kernels)
    assert 0 <= shared <= 227 * 1024
    assert waits == 0


@pytest.mark.nightly
def test_a_replayed_graph_launches_again_what_it_captured_and_the_profiler_sees_it():
    printed = run_on_stand_in("""
        import json
        import torch
        from benchmarks.gpu.profiler import stand_in_profiler
        from quire.ops.reference.elementwise import silu_and_mul
        function = next(i.function for i in silu_and_mul.implementations if i.name == "triton")
        x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)  # a device without an index is the current one
        graph = torch.cuda.CUDAGraph()
        function(x)  # the first launch cannot be captured
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            function(x)
            graph.capture_end()
        with stand_in_profiler(device), torch.profiler.profile(activities=[]) as profiler:
            graph.replay()
            graph.replay()
        events = profiler.events()
        print(json.dumps([str(x.device), [event.name for event in events], events[1].time_range.start]))
    """)
    device, names, start = json.loads(printed.splitlines()[-1])
    assert device == "cuda:0"
    assert len(names) == 2
    assert "silu" in names[0] or "gate" in names[0]
    assert start == 1
