"""Partial results of attention merge by the formula, in float64; with the reference and with Triton's kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.ops.reference.elementwise import merge_partials

Function = Callable[..., Any]


@pytest.fixture(params=["reference", "triton"])
def merge(request: pytest.FixtureRequest) -> Function:
    if request.param == "reference":
        return merge_partials.reference
    pytest.importorskip("triton")
    request.getfixturevalue("interpreter")
    from quire.ops.triton import partials

    return partials.merge_partials


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.mark.sampled(12)
@each_dtype
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("parts", "tokens", "heads", "dim"), [(1, 1, 1, 1), (2, 0, 3, 8), (5, 7, 3, 33), (16, 3, 2, 64)]
)
def test_the_result_is_that_of_the_formula(merge, dtype, with_sinks, parts, tokens, heads, dim):
    """Some parts of some queries are empty, and one query has none at all. Their results may be anything."""
    outs, lses = torch.randn(parts, tokens, heads, dim + 2).to(dtype)[..., :dim], torch.randn(parts, tokens, heads) * 30
    sinks = torch.linspace(-90.0, 90.0, heads) if with_sinks else None
    absent = torch.rand(parts, tokens, heads) < 0.3
    absent[:, :1] = True
    outs, lses = outs.masked_fill(absent[..., None], math.nan), lses.masked_fill(absent, -math.inf)
    out, lse = merge(outs, lses, sinks)
    logits = lses.double() if sinks is None else torch.cat([lses, sinks.expand(1, tokens, heads)]).double()
    wanted_lse = logits.logsumexp(0)
    weights = (lses.double() - wanted_lse).exp().nan_to_num(0.0)
    wanted = (weights[..., None] * outs.double().nan_to_num(0.0)).sum(0)
    assert (out.dtype, out.shape, lse.dtype, lse.shape) == (dtype, wanted.shape, torch.float32, wanted_lse.shape)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


@each_dtype
def test_one_part_is_left_as_it_is_bit_for_bit(merge, dtype):
    outs, lses = torch.randn(2, 7, 3, 8).to(dtype), torch.randn(2, 7, 3)
    lses[0] = -math.inf
    out, lse = merge(outs, lses)
    assert torch.equal(out, outs[1])
    torch.testing.assert_close(lse, lses[1], atol=1e-6, rtol=1e-6)


@pytest.mark.sampled(2)
def test_a_row_does_not_depend_on_the_other_rows(merge):
    outs, lses, sinks = torch.randn(4, 37, 3, 33), torch.randn(4, 37, 3), torch.randn(3)
    whole = merge(outs, lses, sinks)
    for start, stop in ((0, 1), (5, 21), (36, 37)):
        part = merge(outs[:, start:stop], lses[:, start:stop], sinks)
        assert torch.equal(part[0], whole[0][start:stop])
        assert torch.equal(part[1], whole[1][start:stop])
