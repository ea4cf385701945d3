"""gpt-oss as it is published: experts in MXFP4."""

from __future__ import annotations

import pytest
import torch

from quire.layers.experts import SeparateExperts
from support.engines import make_llm, runner_of, teacher_forced_logits
from support.mxfp4 import write_mxfp4


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_experts_in_mxfp4_are_the_dense_ones_that_they_stand_for(tmp_path, backend):
    packed, dense = write_mxfp4(tmp_path)
    text = list(range(10, 60))
    expected = teacher_forced_logits(make_llm(dense, backend), text)
    llm = make_llm(packed, backend)
    torch.testing.assert_close(teacher_forced_logits(llm, text), expected, rtol=1e-4, atol=1e-4)
    experts = runner_of(llm).model.layers[0].mlp.gate_up
    assert isinstance(experts, SeparateExperts)
    bits = sum(tensor.nbytes for tensor in experts.tensors_of(0)) * 8
    outs, ins = 128, runner_of(llm).model.spec.hidden_size
    assert bits < 5.5 * outs * ins + 32 * outs + 16 * 32 + 64
