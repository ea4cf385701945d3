"""gpt-oss as it is published: experts in MXFP4."""

from __future__ import annotations

import pytest
import torch

from quire.loading.mxfp4 import decode_mxfp4
from support.engines import make_llm, teacher_forced_logits
from support.mxfp4 import VALUES, write_mxfp4


def test_every_value_of_the_format_is_decoded():
    blocks = torch.tensor([[[17 * i for i in range(16)]]], dtype=torch.uint8)  # each value twice
    decoded = decode_mxfp4(blocks, torch.tensor([[130]], dtype=torch.uint8))
    assert decoded[0].tolist() == [8 * v for v in VALUES for _ in range(2)]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_experts_in_mxfp4_are_the_dense_ones_that_they_stand_for(tmp_path, backend):
    packed, dense = write_mxfp4(tmp_path)
    text = list(range(10, 60))
    expected = teacher_forced_logits(make_llm(dense, backend), text)
    assert torch.equal(teacher_forced_logits(make_llm(packed, backend), text), expected)
