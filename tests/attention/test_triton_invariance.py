"""Attention on GPUs with batch_invariant, under Triton's interpreter: a token has the same result in every step."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import torch
from attention.test_attention_invariance import Case, Sequences, assert_same_bits

from quire.attention.base import AttentionShape
from quire.attention.selection import choose_backend
from quire.attention.triton.attention_backend import TritonAttention
from quire.attention.triton.varlen_backend import TorchVarlenAttention
from quire.ops.triton.targets import INTERPRETED
from quire.platform.gpu.cards import CARDS

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not INTERPRETED, reason="the caches of this test are in the memory of the host"),
]

LENGTH = 140
CASES = [
    Case(dtype=torch.float32, length=260)  # its keys would be divided
]
SLOW = [
    Case(heads=4, kv_heads=1, dim=80, value_dim=64, dtype=torch.float32, length=LENGTH),
    Case(heads=7, kv_heads=1, dim=80, dtype=torch.float16, length=LENGTH),
    Case(heads=4, kv_heads=4, dim=32, dtype=torch.float32, window=33, sinks=True, length=LENGTH),
    Case(dim=32, dtype=torch.float32, soft_cap=5.0, cell=torch.int8, length=LENGTH),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.nightly) for case in SLOW)], ids=str)
def test_a_tokens_result_does_not_depend_on_the_step(case: Case) -> None:
    sequences = Sequences(case, [case.length, 1, 70], TritonAttention)
    sequences.backend._card = CARDS["sm_90"]  # type: ignore[attr-defined]  # it would divide the keys
    [(out, lse)] = sequences.attend((0, 0, case.length))
    assert torch.isfinite(out.float()).all()
    for place in (64, 139):
        wanted = out[place : place + 1], lse[place : place + 1]
        token = (0, place, place + 1)
        assert_same_bits(sequences.attend(token)[0], wanted, ("alone", place))
        assert_same_bits(sequences.attend((1, 0, 1), (2, 69, 70), token)[2], wanted, ("in a decoding batch", place))
        assert_same_bits(sequences.attend((2, 7, 50), token, (1, 0, 1))[1], wanted, ("beside prompts", place))
    for start, stop in ((30, 34), (64, 140)):
        [chunk] = sequences.attend((0, start, stop))
        assert_same_bits(chunk, (out[start:stop], lse[start:stop]), ("a chunk", start, stop))


def test_other_ways_to_compute_attention_are_refused() -> None:
    shape = AttentionShape(4, 2, 64, 16, torch.float16, torch.device("cpu"), batch_invariant=True)
    assert "batch_invariant" in (TorchVarlenAttention.unsupported(shape) or "")
    with pytest.raises(ValueError, match=r"attention_backend='reference' cannot be used: .*batch_invariant"):
        choose_backend(shape, "reference")
