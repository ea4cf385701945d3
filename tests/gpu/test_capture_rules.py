"""The simulated GPU refuses what CUDA refuses while a graph is captured, and its memory is limited if a test asks."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from support.stand_in import run_on_stand_in

pytestmark = pytest.mark.slow


def test_what_cuda_refuses_during_a_capture_raises_an_error():
    printed = run_on_stand_in("""
        import json
        import torch
        from quire.ops.reference.elementwise import silu_and_mul
        kernel = next(i.function for i in silu_and_mul.implementations if i.name == "triton")
        x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)
        host = torch.zeros(3, 64, dtype=torch.bfloat16)
        pinned = torch.zeros(3, 64, dtype=torch.bfloat16, pin_memory=True)
        side = torch.cuda.Stream()
        other = torch.cuda.Stream()
        before = torch.cuda.Event()
        before.record()

        def captured(run, stream=side):
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.stream(stream):
                    graph.capture_begin()
                    try:
                        run()
                    except RuntimeError as error:
                        try:
                            graph.capture_end()
                        except RuntimeError:
                            return str(error)
                        return "the capture went on after " + str(error)
                    graph.capture_end()
                graph.replay()
            except RuntimeError as error:
                return str(error)

        def beside():
            with torch.cuda.stream(other):
                torch.empty(5, device="cuda")

        def forked(join):
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                x.add(1)
            if join:
                torch.cuda.current_stream().wait_stream(other)

        reasons = {
            "value": captured(lambda: x.sum().item()),
            "copy to the host": captured(lambda: x.cpu()),
            "number": captured(lambda: x.nonzero()),
            "pageable": captured(lambda: out.copy_(host, non_blocking=True)),
            "new from the host": captured(lambda: torch.tensor([1, 2], device="cuda")),
            "synchronize": captured(torch.cuda.synchronize),
            "event": captured(before.synchronize),
            "other stream": captured(beside),
            "earlier work": captured(lambda: torch.cuda.current_stream().wait_event(before)),
            "unjoined": captured(lambda: forked(False)),
            "first load": captured(lambda: kernel(x)),
            "default stream": captured(lambda: x.add(1), torch.cuda.default_stream()),
        }
        kernel(x)
        allowed = {
            "kernel": captured(lambda: kernel(x)),
            "pinned": captured(lambda: out.copy_(pinned, non_blocking=True)),
            "joined": captured(lambda: forked(True)),
            "allocation": captured(lambda: torch.empty(5, device="cuda").add(x.new_zeros(5))),
        }
        print(json.dumps([reasons, allowed]))
    """)
    reasons, allowed = json.loads(printed.splitlines()[-1])
    expected = {
        "value": "the host waits for a value",
        "copy to the host": "the host waits for a copy",
        "number": "the number of nonzero elements",
        "pageable": "copies pageable memory",
        "new from the host": "copies pageable memory",
        "synchronize": "the host waits for the device",
        "event": "the host waits for an event",
        "other stream": "on a stream that is not captured",
        "earlier work": "work from outside of the capture",
        "unjoined": "unjoined work",
        "first load": "loads it onto the device",
        "default stream": "non-default stream",
    }
    assert reasons.keys() == expected.keys()
    for name, part in expected.items():
        assert part in (reasons[name] or ""), (name, reasons[name])
    assert not any(allowed.values()), allowed


def test_graphs_have_their_memory_before_the_kv_cache_and_fewer_are_captured_if_it_is_too_little():
    printed = run_on_stand_in("""
        import json
        from quire import LLM
        from quire.cli.simulated_memory import SimulatedMemory
        MIB = 2**20
        device.traces_graphs = False  # so that tensors within a step are freed, as on a GPU
        device.memory = memory = SimulatedMemory(1000 * MIB, context=64 * MIB, graph=20 * MIB)
        llm = LLM(device="cuda", max_num_seqs=64, max_model_len=1024, load_format="dummy", require_cuda_graphs=True)
        forward = llm.core.executor.runner.forward
        every = forward.num_graphs
        cached = llm.core.executor.kv_cache.num_blocks
        left = memory.free / MIB
        forward._forget_graphs()
        gone = memory.num_graphs
        memory.others = memory.free - 320 * MIB
        forward.capture()
        sizes = {count: [size.tokens for size in of_count] for count, of_count in forward._sizes.items()}
        forward._forget_graphs()
        memory.others += memory.free - 5 * MIB
        try:
            forward.capture()
        except RuntimeError as error:
            reason = str(error)
        print(json.dumps([every, cached, left, gone, memory.num_graphs, sizes, reason]))
    """)
    every, cached, left, gone, none, sizes, reason = json.loads(printed.splitlines()[-1])
    assert every > 15
    assert 1000 < cached < 4097, "all requests together could use 4097 blocks"
    assert 100 + 256 <= left < 100 + 256 + 80, "a tenth of the memory, the reserve and that of a step are not used"
    assert gone == none == 0
    assert sizes["1"][0] == 1
    assert 1 < sum(map(len, sizes.values())) < every
    assert "the CUDA graphs cannot be captured: CUDA out of memory" in reason


def test_memory_that_cannot_be_pinned_leaves_no_error_for_the_next_launch():
    printed = run_on_stand_in("""
        import torch
        from quire.worker.kv_transfer import DeviceRows
        blocks = torch.zeros(4, 64, dtype=torch.uint8, device="cuda")
        memory = torch.zeros(2**20, dtype=torch.uint8)
        device.streams.register_status = 712  # it is registered already
        torch.cuda.cudart().cudaHostRegister(0, 1, 0)
        try:
            blocks.add(1)
        except RuntimeError as error:
            print(error)
        DeviceRows(blocks).pin(memory)
        blocks.add(1)
        print("no error")
    """)
    first, *_, last = printed.splitlines()
    assert first.startswith("CUDA error 712, reported by aten.add")
    assert last == "no error"


def test_the_memory_of_graphs_is_estimated_with_the_parts_of_divided_attention():
    """They have the same size in all steps with equally many tokens per request, and a different one in mixed steps."""
    printed = run_on_stand_in("""
        import json
        from quire import LLM
        from quire.cli.simulated_memory import SimulatedMemory
        MIB = 2**20
        device.traces_graphs = False
        device.memory = memory = SimulatedMemory(8192 * MIB, context=64 * MIB, graph=2 * MIB)
        drafts = {"method": "ngram", "num_speculative_tokens": 3}
        for requests, options in ((16, {}), (64, {}), (16, {"speculative_config": drafts})):
            llm = LLM(device="cuda", max_num_seqs=requests, max_model_len=2048, load_format="dummy",
                      num_gpu_blocks_override=256, require_cuda_graphs=True, **options)
            forward = llm.core.executor.runner.forward
            forward._forget_graphs()
            estimate = forward.trial()
            free = memory.free
            forward.capture()
            print(json.dumps([estimate / MIB, (free - memory.free) / MIB]))
            llm.shutdown()
            del llm, forward
    """)
    for line in printed.splitlines():
        estimate, used = json.loads(line)
        assert used <= estimate <= 1.1 * used
