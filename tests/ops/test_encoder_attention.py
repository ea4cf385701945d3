"""Attention of whole sequences: against its formula in float64, and against itself with other neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.ops import Target
from support.implementations import for_cpus

CPU = torch.device("cpu")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda t: str(t)[6:])
IMPLEMENTATIONS = for_cpus("encoder_attention")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda i: i.name)
def function(request: pytest.FixtureRequest):
    if not request.param.supports(Target(CPU, torch.float32)):
        pytest.skip("not supported here")
    return request.param.function


def formula(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, reach: int | None, bias: Tensor | None = None
) -> Tensor:
    out, group = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    for start, stop in pairwise(starts.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].double(), k[start:stop]) * scale
        places = torch.arange(stop - start)
        if bias is not None:
            far = bias.shape[1] // 2
            scores += bias.double()[:, far + (places - places[:, None]).clamp(-far, far)]
        if reach is not None:
            scores.masked_fill_((places[:, None] - places).abs() > reach, -torch.inf)
        out[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:stop])
    return out


def drawn(dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as parts of one fused projection."""
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    return fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]


@pytest.mark.sampled(24)
@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 32), (4, 2, 64), (2, 1, 24), (1, 1, 5), (2, 2, 128)])
@pytest.mark.parametrize("lengths", [(1,), (3, 1, 17), (0, 130, 0, 64, 5), (300, 257)], ids=str)
def test_it_is_the_formula(function, dtype, heads, kv_heads, dim, lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = drawn(dtype, sum(lengths), heads, kv_heads, dim)
    for reach in (None, 0, 1, 40, 128):
        got = function(q, k, v, starts, dim**-0.5, reach)
        assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, q.shape, True)
        wanted = formula(q, k, v, starts, dim**-0.5, reach)
        tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype]
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(4)
@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "far"), [(3, 3, 33, 1), (4, 2, 64, 20), (2, 2, 24, 128)])
def test_scores_get_the_bias_of_their_distance(function, dtype, heads, kv_heads, dim, far):
    starts = torch.tensor([0, 3, 3, 300, 380], dtype=torch.int32)
    q, k, v = drawn(dtype, 380, heads, kv_heads, dim)
    bias = 2 * torch.randn(heads, 2 * far + 1)
    tolerance = 2e-5 if dtype is torch.float32 else 0.03
    for reach in (None, 40):
        got, wanted = (f(q, k, v, starts, dim**-0.5, reach, bias) for f in (function, formula))
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@dtypes
def test_scores_may_be_large(function, dtype):
    q, k, v = drawn(dtype, 50, 2, 2, 32)
    starts = torch.tensor([0, 50], dtype=torch.int32)
    got = function(q * 100, k * 10, v, starts, 1.0, None)
    torch.testing.assert_close(got.double(), formula(q * 100, k * 10, v, starts, 1.0, None), rtol=0.03, atol=0.03)


def test_padding_behind_the_sequences_is_left_out(function):
    q, k, v = drawn(torch.float32, 20, 2, 2, 32)
    starts = torch.tensor([0, 7, 12], dtype=torch.int32)
    got = function(q, k, v, starts, 0.2, None)[:12]
    torch.testing.assert_close(got, function(q[:12], k[:12], v[:12], starts, 0.2, None))


@dtypes
@pytest.mark.parametrize("reach", [None, 50])
def test_a_sequence_has_the_same_result_bit_for_bit_beside_any_others(dtype, reach):
    implementation = IMPLEMENTATIONS[-1]
    if implementation.name == "reference" or not implementation.supports(Target(CPU, dtype)):
        pytest.skip("not supported here")
    q, k, v = drawn(dtype, 350, 4, 2, 64)
    for lengths in ((150, 200), (1, 149, 200), (75, 75, 13, 187)):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        together = implementation.function(q, k, v, starts, 0.125, reach)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for start, stop in pairwise(starts.tolist()):
                one = torch.tensor([0, stop - start], dtype=torch.int32)
                alone = implementation.function(q[start:stop], k[start:stop], v[start:stop], one, 0.125, reach)
                assert torch.equal(alone, together[start:stop])
