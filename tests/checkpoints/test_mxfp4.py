"""gpt-oss as it is published: experts in MXFP4."""

from __future__ import annotations

import pytest
import torch

from quire.checkpoints.formats.scheme import Groups
from quire.checkpoints.formats.tables import MXFP4
from quire.layers.experts import SeparateExperts
from quire.layers.linear import LinearShape
from quire.layers.specs import OutputPart
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


def test_scales_of_all_experts_have_one_type_so_that_one_product_serves_them():
    """Exponents that float16 lacks included, and none of them is changed."""
    shape = LinearShape((OutputPart("experts", 2, 0, 2),), 64, 0, 64)
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    for exponents in (torch.full((2, 2), 127), torch.tensor([[0, 1], [253, 254]])):
        matrix = MXFP4._matrix(codes, exponents.to(torch.uint8), Groups.of(shape, 32), shape, 0)
        assert matrix.scales.dtype is torch.bfloat16
        assert torch.equal(matrix.scales.double(), 2.0 ** (exponents.double() - 127))
