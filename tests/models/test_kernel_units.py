"""The translation units that are compiled before an engine of a model computes with C++ kernels."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.ops.cpu import build
from support.checkpoints import ALL_VARIANTS
from support.engines import MAX_MODEL_LEN


@pytest.mark.skipif(build.library() is None, reason="the CPU kernels cannot be compiled here")
@pytest.mark.sampled(12)
@pytest.mark.parametrize("variant", list(ALL_VARIANTS))
def test_a_model_calls_no_kernel_of_a_unit_that_it_does_not_prepare(checkpoints, monkeypatch, variant):
    prepared, called = set[str](), set[str]()
    real = build._kernel
    monkeypatch.setattr(build, "prepare", lambda units, may_defer: prepared.update(units))
    monkeypatch.setattr(build, "_kernel", lambda name, arguments: called.add(name) or real(name, arguments))
    llm = LLM(checkpoints.path(variant), dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=8)
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    drawn = SamplingParams(temperature=1, top_k=5, top_p=0.9, max_tokens=3, ignore_eos=True)
    for prompt in ([5, 6, 7], list(range(5, 60))):
        llm.generate([{"prompt_token_ids": prompt}] * 2, [greedy, drawn], use_tqdm=False)
    unit_of = {kernel: unit.name for unit in build.read_units(build.SOURCES).values() for kernel in unit.kernels}
    assert {unit_of[name] for name in called} <= prepared, called
