"""The scan in chunks on GPUs that are not there: its machine code for the shapes of known models, and its launches."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from support.stand_in import run_on_stand_in

CODE = """
    import json
    import torch
    from benchmarks.gpu.rules import judged
    from quire.attention.base import StepLayout
    from quire.attention.states import StateBackend
    from quire.kv.specs import StateShape
    from quire.ops.reference.states import Pages
    from quire.ops.triton.state_chunks import scan

    gpu = torch.device("cuda", 0)
    SHAPES = {  # heads, heads of keys, sizes of keys and values, decays and scales of a head
        "Mamba-2": (48, 1, 128, 64, 1, 1, "plain"),
        "Qwen3-Next": (32, 16, 128, 128, 1, 1, "delta"), "Kimi Linear": (16, 16, 128, 128, 128, 1, "delta"),
        "RWKV-7": (32, 32, 64, 64, 64, 128, "removal"),
    }

    def launched(name, tokens, requests, each):
        heads, key_heads, key_dim, value_dim, decays, scales, rule = SHAPES[name]
        shape = StateShape(heads, key_heads, key_dim, value_dim, 64, 4, decays, scales)
        backend = StateBackend(shape, 528, 2)
        memory = torch.empty(9, backend.entry_bytes(), dtype=torch.uint8, device=gpu)
        pages = Pages.of(backend.view(memory, 0), shape, 2)
        i32 = dict(dtype=torch.int32, device=gpu)
        plan = backend.plan(StepLayout(
            torch.empty(requests + 1, **i32), torch.empty(requests, **i32), torch.empty(tokens, device=gpu),
            torch.empty(requests, 8, **i32), tokens_per_request=each,
        ))
        q, k = (torch.empty(tokens, key_heads, key_dim, dtype=torch.bfloat16, device=gpu) for _ in range(2))
        v = torch.empty(tokens, heads, value_dim, dtype=torch.bfloat16, device=gpu)
        decay, scale = (torch.empty(tokens, heads * n, device=gpu) for n in (decays, scales))
        with device.traced() as launches:
            scan(q, k, v, decay, scale, None, pages, plan, rule)
        return [launch for launch in launches if launch.kernel is not None]

    made = {name: [judged(launch, device.card) for launch in launched(name, 4096, 2, 0)] for name in SHAPES}
    decoding = [launch.name for launch in launched("RWKV-7", 256, 256, 1)]
    print(json.dumps([made, decoding]))
"""


SPILLING = {("RWKV-7", "_prepare"), ("Kimi Linear", "_prepare"), ("Kimi Linear", "_scan_chunks")}


@pytest.mark.sampled(3)
@pytest.mark.nightly
@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_120"])
def test_the_chunks_use_tensor_cores_and_spill_no_more_than_is_known(card):
    made, decoding = json.loads(run_on_stand_in(CODE, card).splitlines()[-1])
    for name, kernels in made.items():
        assert [kernel["name"] for kernel in kernels] == ["_prepare", "_scan_chunks", "_scan", "_keep"], name
        for kernel in kernels[:2]:
            assert kernel["broken"] == [], (name, kernel["name"])
            assert kernel["dots"], (name, kernel["name"])
            assert all(dot[0] != "fma" for dot in kernel["dots"]), (name, kernel["dots"])  # TF32
            most = 1200 if (name, kernel["name"]) in SPILLING else 0  # bytes of loads and stores
            assert kernel["spilled"] <= most, (name, kernel["name"], kernel["spilled"])
    assert decoding == ["_scan", "_keep"]
