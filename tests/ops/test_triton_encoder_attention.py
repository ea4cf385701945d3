"""Attention of whole sequences in Triton, under Triton's interpreter: as the reference computes it."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from quire.ops.reference.encoder_attention import encoder_attention
from quire.ops.triton.encoder_attention import encoder_attention_triton
from quire.ops.triton.targets import INTERPRETED

pytestmark = pytest.mark.usefixtures("interpreter")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def drawn(dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as parts of one fused projection."""
    torch.manual_seed(tokens)
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    return fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]


def starts_of(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


@pytest.mark.sampled(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "lengths"),
    [(3, 3, 32, (1,)), (4, 2, 64, (3, 1, 17)), (2, 1, 24, (0, 130, 0, 64, 5)), (2, 2, 160, (40, 33))],
)
@pytest.mark.parametrize("reach", [None, 0, 1, 40])
def test_it_is_the_reference(dtype, heads, kv_heads, dim, lengths, reach):
    """With padding behind the sequences."""
    q, k, v = drawn(dtype, sum(lengths) + 9, heads, kv_heads, dim)
    got = encoder_attention_triton(q, k, v, starts_of(*lengths), dim**-0.5, reach)
    wanted = encoder_attention.reference(q.float(), k.float(), v.float(), starts_of(*lengths), dim**-0.5, reach)
    assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, q.shape, True)
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(got.float()[:-9], wanted[:-9], rtol=tolerance, atol=tolerance)


def test_scores_may_be_large():
    q, k, v = drawn(torch.float32, 50, 2, 2, 32)
    got = encoder_attention_triton(q * 100, k * 10, v, starts_of(50), 1.0, None)
    torch.testing.assert_close(got, encoder_attention.reference(q * 100, k * 10, v, starts_of(50), 1.0, None))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reach", [None, 7])
def test_biases_by_distance(reach):
    q, k, v = drawn(torch.float16, 150, 2, 2, 32)
    bias, starts = torch.randn(2, 41, device=DEVICE), starts_of(100, 1, 49)
    got = encoder_attention_triton(q, k, v, starts, 1.0, reach, bias)
    wanted = encoder_attention.reference(q.float(), k.float(), v.float(), starts, 1.0, reach, bias)
    torch.testing.assert_close(got.float(), wanted, rtol=2**-9, atol=2**-9)


def test_no_tokens():
    q, k, v = drawn(torch.float32, 0, 2, 2, 32)
    assert encoder_attention_triton(q, k, v, starts_of(0), 1.0, None).shape == (0, 2, 32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reach", [pytest.param(None, marks=pytest.mark.sampled(4)), 50])
def test_a_sequence_has_the_same_result_bit_for_bit_beside_any_others(reach):
    q, k, v = drawn(torch.float16, 150, 2, 1, 32)
    for lengths in ((70, 80), (1, 69, 80), (50, 20, 13, 67)):
        starts = starts_of(*lengths)
        together = encoder_attention_triton(q, k, v, starts, 0.2, reach)
        for start, stop in pairwise(starts.tolist()):
            part = slice(start, stop)
            alone = encoder_attention_triton(q[part], k[part], v[part], starts_of(stop - start), 0.2, reach)
            assert torch.equal(alone, together[part])
